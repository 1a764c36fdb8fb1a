// What test programs say when something is not so: to be included by each of them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

inline void expect(bool holds, const std::string & what) {
    if (holds) return;
    printf("not so: %s\n", what.c_str());
    fflush(stdout);
    _Exit(1);
}
