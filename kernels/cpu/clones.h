// One function compiled for several instruction sets, chosen when the program starts. No version contracts multiply and
// add (-ffp-contract=off), so all give the same bits. Sanitizers run before the choice can be made and get one version.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define GLM53_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define GLM53_CLONES
#endif
