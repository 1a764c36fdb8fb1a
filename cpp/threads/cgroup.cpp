// cpu.max (version 2) and cpu.cfs_quota_us (version 1) of our group and of those above it.
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

bool names_cpu(const std::string & controllers) {
    return ("," + controllers + ",").find(",cpu,") != std::string::npos;
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

double cpu_quota(const std::string & sys_root, const std::string & proc_root) {
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
        } else if (names_cpu(controllers)) {
            add_with_parents(root + "/" + controllers, path, folders);
        }
    }
    for (const char * name : {"", "/cpu", "/cpu,cpuacct"}) folders.push_back(root + name);
    double least = 0;
    for (const std::string & folder : folders) {
        const double quota = quota_of(folder);
        if (quota > 0 && (least == 0 || quota < least)) least = quota;
    }
    return least;
}

}  // namespace hybrid_moe
