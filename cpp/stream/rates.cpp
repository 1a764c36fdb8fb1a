// The rates' file: a line per kind of layer, name and numbers separated by tabs; the last line of a name counts.
#include "stream/rates.h"

#include "stream/decimal.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

namespace hybrid_moe {
namespace {

std::mutex                    mutex;
std::map<std::string, Rates> & of_this_process() {
    static auto * known = new std::map<std::string, Rates>;
    return *known;
}

std::string number(double v) { return decimal(v, 9); }

std::string line_of(const std::string & name, const Rates & r) {
    std::string line = name;
    const auto add = [&line](double v) { line.append("\t").append(number(v)); };
    add(r.cpu.s_per_expert);
    add(r.cpu.s_per_row);
    for (const DeviceRate & d : r.devices) {
        for (const double v : {d.copy_s_per_byte, d.copy_s, d.compute_s_per_row, d.compute_s}) add(v);
    }
    return line.append("\n");
}

// Nothing when the line is damaged or of another number of devices.
std::optional<Rates> parse(const std::string & numbers, size_t n_devices) {
    std::istringstream in(numbers);
    std::vector<double> v;
    for (std::string word; in >> word;) {
        double d;
        if (!parse_decimal(word.c_str(), d) || !std::isfinite(d) || d < 0) return std::nullopt;
        v.push_back(d);
    }
    if (v.size() != 2 + 4 * n_devices) return std::nullopt;
    Rates r;
    r.cpu = {v[0], v[1]};
    for (size_t i = 0; i < n_devices; i++) r.devices.push_back({v[2 + 4 * i], v[3 + 4 * i], v[4 + 4 * i], v[5 + 4 * i]});
    return r;
}

std::optional<Rates> in_file(const std::string & name, size_t n_devices) {
    std::ifstream file(rates_path());
    std::optional<Rates> found;
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, name.size(), name) == 0 && line.size() > name.size() && line[name.size()] == '\t') {
            found = parse(line.substr(name.size() + 1), n_devices);
        }
    }
    return found;
}

std::string read_cpu_name() {
    std::ifstream info("/proc/cpuinfo");
    for (std::string line; std::getline(info, line);) {
        if (line.compare(0, 10, "model name") != 0) continue;
        const size_t colon = line.find(':');
        return colon == std::string::npos || colon + 2 > line.size() ? "" : line.substr(colon + 2);
    }
    return "unknown CPU";
}

}  // namespace

std::string Rates::print() const {
    std::string all = "CPU " + decimal(cpu.s_per_expert * 1e3, 3) + " ms per expert, " + decimal(cpu.s_per_row * 1e6, 3) + " us per row";
    for (size_t i = 0; i < devices.size(); i++) {
        const DeviceRate & d = devices[i];
        all += "; device " + std::to_string(i) + ": " + decimal(d.copy_s_per_byte > 0 ? 1e-9 / d.copy_s_per_byte : 0.0, 3) + " GB/s, " +
               decimal(d.compute_s_per_row * 1e6, 3) + " us per row";
    }
    return all;
}

std::string rates_path() {
    const char * cache = getenv("XDG_CACHE_HOME");
    if (cache && *cache) return std::string(cache) + "/hybrid-moe/rates-1.tsv";
    const char * home = getenv("HOME");
    return home && *home ? std::string(home) + "/.cache/hybrid-moe/rates-1.tsv" : std::string();
}

std::optional<Rates> known_rates(const std::string & name, size_t n_devices) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = of_this_process().find(name);
    if (known != of_this_process().end() && known->second.devices.size() == n_devices) return known->second;
    const std::optional<Rates> found = in_file(name, n_devices);
    if (found) of_this_process()[name] = *found;
    return found;
}

void know_rates(const std::string & name, const Rates & rates) {
    const std::lock_guard<std::mutex> lock(mutex);
    of_this_process()[name] = rates;
}

void keep_rates(const std::string & name, const Rates & rates) {
    know_rates(name, rates);
    const std::lock_guard<std::mutex> lock(mutex);
    const std::string path = rates_path();
    if (path.empty()) return;
    for (size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
        mkdir(path.substr(0, slash).c_str(), 0700);  // those that are there stay as they are
    }
    // One write per line: processes that measure at the same time do not mix their lines. A cache that cannot be written
    // costs a measurement next time.
    std::ofstream file(path, std::ios::app);
    file << line_of(name, rates) << std::flush;
}

const std::string & cpu_name() {
    static const std::string name = read_cpu_name();  // asked for in every layer
    return name;
}

}  // namespace hybrid_moe
