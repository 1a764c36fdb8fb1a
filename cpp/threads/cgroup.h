// What control groups (version 2, or 1) grant this process of CPU time and memory, and the reading of one-line files.
#pragma once

#include <cstdint>
#include <string>

namespace hybrid_moe {

// CPUs' worth of time, the tightest limit up the tree; 0 without one, or when nothing sensible is to be read.
double cpu_quota(const std::string & sys_root, const std::string & proc_root);

// Bytes that may still be allocated, page cache of the group counted as free; UINT64_MAX without a limit.
uint64_t cgroup_memory_left(const std::string & sys_root, const std::string & proc_root);

// The first line of a file without its end. False when it cannot be read or is empty.
bool read_line(const std::string & path, std::string & out);

// What follows `label` (such as "Mems_allowed_list:") on the line of a file that begins with it.
bool read_field(const std::string & path, const std::string & label, std::string & out);

}  // namespace hybrid_moe
