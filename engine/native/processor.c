/* Finds out, once, which of our kernels this processor can run. */

#include "processor.h"

#include <sys/syscall.h>
#include <unistd.h>

int outrider_has_tiles = 0;

static int has_vectors(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

/* Whether the processor, and the operating system under us, give AMX. */
static int has_tiles(void) {
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    if (!((d >> 22) & 1) || !((d >> 24) & 1) || !((d >> 25) & 1)) return 0; /* AMX-BF16, AMX-TILE, AMX-INT8 */
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}

/* Call it before any kernel: one of `enum processor`. */
int outrider_start(int may_use_tiles) {
    if (!has_vectors()) return NEITHER;
    outrider_has_tiles = may_use_tiles && has_tiles();
    return outrider_has_tiles ? WITH_TILES : ONLY_VECTORS;
}
