/* Detects, once, which of our kernels this processor can run. */

#include "processor.h"

#include <sys/syscall.h>
#include <unistd.h>

int outrider_has_wide_floats = 0, outrider_has_vectors = 0, outrider_has_tiles = 0;
int outrider_splits_pairs = 0;
int outrider_is_amd = 0;

static int has_vectors(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

/* True if the processor and the operating system support AMX. */
static int has_tiles(void) {
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    if (!((d >> 22) & 1) || !((d >> 24) & 1) || !((d >> 25) & 1)) return 0; /* AMX-BF16, AMX-TILE, AMX-INT8 */
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}

static enum instructions best(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return NONE;
    if (!__builtin_cpu_supports("f16c")) return NONE;
    if (!has_vectors()) return WITH_AVX2;
    return has_tiles() ? WITH_AMX : WITH_AVX512;
}

/* Call this before any kernel. It returns the instructions that the kernels will use, at most `limit`. */
int outrider_start(int limit) {
    const int found = best(), used = found < limit ? found : limit;
    outrider_has_wide_floats = limit >= WITH_AVX512 && __builtin_cpu_supports("avx512f");
    outrider_has_vectors = used >= WITH_AVX512;
    outrider_has_tiles = used >= WITH_AMX;
    outrider_splits_pairs = used == WITH_AVX512 && __builtin_cpu_is("intel");
    outrider_is_amd = __builtin_cpu_is("amd");
    return used;
}
