// /proc/self/maps -> MappedFile.
#include "plugin/mapped_file.h"

#include "checkpoint/mapping.h"

#include <sys/stat.h>

#include <cinttypes>
#include <cstdio>
#include <memory>
#include <vector>

namespace hybrid_moe {

MappedFile mapping_around(const void * address) {
    struct Area { uintptr_t begin, end; uint64_t offset; FileId id; std::string path; };
    std::vector<Area> areas;
    std::unique_ptr<FILE, int (*)(FILE *)> maps(fopen("/proc/self/maps", "re"), fclose);
    if (!maps) return {};
    char line[4608];
    while (fgets(line, sizeof line, maps.get())) {
        Area a{};
        unsigned major, minor;
        int path_at = 0;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %" SCNx64 " %x:%x %" SCNu64 " %n", &a.begin, &a.end, &a.offset,
                   &major, &minor, &a.id.inode, &path_at) < 6 || a.id.inode == 0) {
            continue;
        }
        a.id.device = uint64_t(major) << 32 | minor;
        a.path = line + path_at;
        a.path.erase(a.path.find_last_not_of('\n') + 1);
        areas.push_back(a);
    }
    const uintptr_t at = uintptr_t(address);
    size_t i = 0;
    while (i < areas.size() && !(areas[i].begin <= at && at < areas[i].end)) i++;
    if (i == areas.size()) return {};
    const auto continues = [&](size_t a, size_t b) {
        return areas[a].end == areas[b].begin && areas[a].id == areas[b].id &&
               areas[a].offset + (areas[a].end - areas[a].begin) == areas[b].offset;
    };
    size_t first = i;
    size_t last = i;
    while (first > 0 && continues(first - 1, first)) first--;
    while (last + 1 < areas.size() && continues(last, last + 1)) last++;
    if (areas[first].offset != 0) return {};
    return {reinterpret_cast<const uint8_t *>(areas[first].begin), areas[last].end - areas[first].begin, areas[i].path, areas[i].id};
}

FilePiece piece_of(const MappedFile & m, const uint8_t * data, uint64_t n_bytes) {
    struct stat st;
    // The path may lead to another file by now; a mapped one keeps its number.
    const bool is_same = stat(m.path.c_str(), &st) == 0 && uint64_t(st.st_ino) == m.id.inode;
    return {m.id.device, m.id.inode, is_same ? changed_at(st) : 0, uint64_t(data - m.base), n_bytes};
}

}  // namespace hybrid_moe
