// The limits of our group and of those above it: cpu.max, memory.max (version 2), cpu.cfs_quota_us, memory.limit_in_bytes (1).
#include "threads/cgroup.h"

#include <cstdlib>
#include <fstream>
#include <vector>

namespace hybrid_moe {
namespace {

double quota_of(const std::string & folder) {
    std::string text;
    if (read_line(folder + "/cpu.max", text)) {
        char * end;
        const double quota = strtod(text.c_str(), &end);  // "max" reads as 0
        const double period = strtod(end, nullptr);
        return quota > 0 && period > 0 ? quota / period : 0;
    }
    std::string period;
    if (!read_line(folder + "/cpu.cfs_quota_us", text) || !read_line(folder + "/cpu.cfs_period_us", period)) return 0;
    const double quota_us = atof(text.c_str());  // -1: no limit
    const double period_us = atof(period.c_str());
    return quota_us > 0 && period_us > 0 ? quota_us / period_us : 0;
}

uint64_t number_in(const std::string & path) {
    std::string text;
    return read_line(path, text) && text[0] >= '0' && text[0] <= '9' ? strtoull(text.c_str(), nullptr, 10) : UINT64_MAX;
}

uint64_t memory_left_in(const std::string & folder) {
    const bool v2 = number_in(folder + "/memory.current") != UINT64_MAX;
    const uint64_t limit = number_in(folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes"));
    uint64_t used = number_in(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"));
    if (limit == UINT64_MAX || used == UINT64_MAX) return UINT64_MAX;
    for (const char * label : {"inactive_file ", "active_file ", "total_inactive_file ", "total_active_file "}) {
        std::string text;
        if ((label[0] == 't') == v2 || !read_field(folder + "/memory.stat", label, text)) continue;
        const uint64_t cached = strtoull(text.c_str(), nullptr, 10);
        used -= cached < used ? cached : used;
    }
    return limit > used ? limit - used : 0;
}

bool names(const std::string & controllers, const std::string & controller) {
    return ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
}

// The group's folder and those above it. In a container the own group is mounted as the root, whatever its path says,
// so the root itself counts too.
void add_with_parents(const std::string & root, std::string path, std::vector<std::string> & out) {
    while (!path.empty() && path != "/") {
        out.push_back(root + path);
        path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
    out.push_back(root);
}

}  // namespace

bool read_line(const std::string & path, std::string & out) {
    std::ifstream file(path);
    return bool(std::getline(file, out)) && !out.empty();
}

bool read_field(const std::string & path, const std::string & label, std::string & out) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, label.size(), label) == 0) {
            out = line.substr(label.size());
            return true;
        }
    }
    return false;
}

namespace {

// Every folder that may limit this process's `controller`.
std::vector<std::string> folders_of(const std::string & controller, const std::string & sys_root, const std::string & proc_root) {
    const std::string root = sys_root + "/fs/cgroup";
    std::vector<std::string> folders;
    std::ifstream groups(proc_root + "/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // "id:controllers:/path", no controllers: version 2
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string path = line.substr(second + 1);
        if (controllers.empty()) {
            add_with_parents(root, path, folders);
            add_with_parents(root + "/unified", path, folders);
        } else if (names(controllers, controller)) {
            add_with_parents(root + "/" + controllers, path, folders);
        }
    }
    folders.push_back(root);
    folders.push_back(root + "/" + controller);
    if (controller == "cpu") folders.push_back(root + "/cpu,cpuacct");
    return folders;
}

}  // namespace

double cpu_quota(const std::string & sys_root, const std::string & proc_root) {
    double least = 0;
    for (const std::string & folder : folders_of("cpu", sys_root, proc_root)) {
        const double quota = quota_of(folder);
        if (quota > 0 && (least == 0 || quota < least)) least = quota;
    }
    return least;
}

uint64_t cgroup_memory_left(const std::string & sys_root, const std::string & proc_root) {
    uint64_t least = UINT64_MAX;
    for (const std::string & folder : folders_of("memory", sys_root, proc_root)) {
        const uint64_t left = memory_left_in(folder);
        least = left < least ? left : least;
    }
    return least;
}

}  // namespace hybrid_moe
