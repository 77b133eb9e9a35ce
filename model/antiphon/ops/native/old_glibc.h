// Included before everything else in wheels, which must run with glibc 2.28 and libstdc++ 8 (manylinux_2_28, PEP 600):
// the versions that symbols had before newer ones, which a newer linker would choose. The functions are the same.
#pragma once

#if defined(__x86_64__)
#define ANTIPHON_OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define ANTIPHON_OLDEST "GLIBC_2.17"
#endif
#if defined(__x86_64__)
#define ANTIPHON_OLDEST_NAMES "GLIBC_2.12"  // of pthread_setname_np
#else
#define ANTIPHON_OLDEST_NAMES ANTIPHON_OLDEST
#endif

#define ANTIPHON_SYMBOL(name, version) __asm__(".symver " name "," name "@" version)

// From 2.34 on part of libc; only the version changed.
ANTIPHON_SYMBOL("dladdr", ANTIPHON_OLDEST);
ANTIPHON_SYMBOL("dlerror", ANTIPHON_OLDEST);
ANTIPHON_SYMBOL("dlopen", ANTIPHON_OLDEST);
ANTIPHON_SYMBOL("dlsym", ANTIPHON_OLDEST);
ANTIPHON_SYMBOL("pthread_once", ANTIPHON_OLDEST);
ANTIPHON_SYMBOL("pthread_setname_np", ANTIPHON_OLDEST_NAMES);
// From 2.29 on without errno for some arguments.
ANTIPHON_SYMBOL("exp", ANTIPHON_OLDEST);
ANTIPHON_SYMBOL("log", ANTIPHON_OLDEST);
// std::condition_variable::wait, from GCC 12 on a point at which threads can be cancelled.
ANTIPHON_SYMBOL("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE", "GLIBCXX_3.4.11");
