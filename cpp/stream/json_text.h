// A text as JSON has it.
#pragma once

#include <string>

namespace hybrid_moe {

inline std::string json_text(const std::string & text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + '"';
}

}  // namespace hybrid_moe
