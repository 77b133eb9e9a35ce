// Marks a function that Python calls by name; all other functions of the library are hidden.
#pragma once

#define ANTIPHON_EXPORT extern "C" __attribute__((visibility("default")))
