/* AMX instructions with correct memory operands. GCC declares that `_tile_loadconfig` reads eight bytes and
   `_tile_loadd` reads no memory. So it may drop earlier writes to that memory (GCC 12 did, and the processor
   faulted). */

#pragma once

#include "processor.h"

/* A memory operand: the instruction reads memory from `at` on. */
#define READ_FROM(at) "m"(*(const char(*)[])(at))

#define tile_load(tile, at, stride) \
    __asm__ volatile("tileloadd (%0, %1, 1), %%tmm" #tile :: "r"(at), "r"((int64_t)(stride)), READ_FROM(at))

/* Configures the tiles: sums (0 1: of low rows, 2 3: of high rows), rows of `row_bytes` (4: low, 5: high), and the
   other operands (6 7) with as many inputs. */
AMX static inline void configure_tiles_for(int64_t rows_low, int64_t rows_high, int row_bytes) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    const int64_t inputs = row_bytes / 4;
    const int64_t rows[8] = {rows_low, rows_low, rows_high, rows_high, rows_low, rows_high, inputs, inputs};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = (uint8_t)(rows[i] ? rows[i] : 1);
        config.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? row_bytes : 64);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

AMX static inline void configure_tiles(int64_t rows_low, int64_t rows_high) {
    configure_tiles_for(rows_low, rows_high, 64);
}
