// AMX for bf16 weights, through a matrix kernel ("brgemm") that someone else provides: libtorch ships
// oneDNN's, which drives the tiles. Kernels don't know torch, so the function is handed in.
//
// Permission to use the tile registers (arch_prctl(ARCH_REQ_XCOMP_PERM)) is asked for by the library
// behind brgemm (oneDNN does at its first look at the CPU), not here; where the kernel refuses, that
// library computes without AMX.
//
// Sums on AMX are rounded in other places than those of the avx512bf16 kernels, so the two give slightly
// different bits. The kAmx table uses brgemm for any number of rows, hence one table's results don't
// depend on how many rows it is given; kernel_table_for_rows() chooses between the two.
#pragma once

#include <cstdint>

namespace numa_moe {

// c[m, n] = sum over k of a[m, k] * b[k, n], in fp32; a is row-major bf16 with ld_a elements between rows,
// c row-major with ld_c. With is_vnni, b is [k / 2][ld_b][2]: our panel, with ld_b = n = kPanelWidth.
// add_c: the sum is added to what c holds. The arguments are those of at::native::cpublas::brgemm.
using Bfloat16Brgemm = void (*)(int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c,
                                bool add_c, const uint16_t* a, const uint16_t* b, float* c, bool is_vnni);
// Ends a thread's use of the tile registers, after calls of brgemm on it.
using BrgemmRelease = void (*)();

// To be called before kernels are chosen, from one thread. Null takes AMX away again. release may be null.
void set_bf16_brgemm(Bfloat16Brgemm brgemm, BrgemmRelease release);

}  // namespace numa_moe
