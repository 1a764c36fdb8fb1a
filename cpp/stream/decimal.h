// Numbers as text and back, whatever locale the host has set: files and reports always have a point.
#pragma once

#include <charconv>
#include <cstring>
#include <string>

namespace hybrid_moe {

// The shortest text that has `digits` significant digits.
inline std::string decimal(double v, int digits) {
    char text[48];
    const auto end = std::to_chars(text, text + sizeof text, v, std::chars_format::general, digits);
    return std::string(text, end.ptr);
}

// False when the whole text is no number.
inline bool parse_decimal(const char * text, double & out) {
    const char * end = text + strlen(text);
    const auto result = std::from_chars(text, end, out);
    return result.ec == std::errc() && result.ptr == end && end != text;
}

}  // namespace hybrid_moe
