// The instructions of tensor cores that the attention kernels use (PTX ISA, "Warp-level matrix instructions"; sm_80).
//
// One warp multiplies a (16, 16) matrix by a (16, 8) one and adds the (16, 8) product to sums of 32 bits. Lane l holds,
// with g = l / 4 and t = l % 4: of the left matrix, rows g and g + 8, columns 2 t, 2 t + 1 and both plus 8; of the right
// one, column g, the same numbers as rows; of the sums, rows g and g + 8, columns 2 t and 2 t + 1.
#pragma once
#include "common.cuh"

struct Left {
    unsigned part[4];  // two numbers each: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
};

__device__ inline void multiply_add(float (&sums)[4], const Left& a, unsigned b0, unsigned b1, __nv_bfloat16) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a.part[0]), "r"(a.part[1]), "r"(a.part[2]), "r"(a.part[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply_add(float (&sums)[4], const Left& a, unsigned b0, unsigned b1, __half) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a.part[0]), "r"(a.part[1]), "r"(a.part[2]), "r"(a.part[3]), "r"(b0), "r"(b1));
}

__device__ inline unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Four (8, 8) matrices of 16 bits: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes aligned to 16, and
// gets of each matrix row g, columns 2 t and 2 t + 1; of the transposed matrix where TURNED.
template <bool TURNED> __device__ inline void load_matrices(unsigned (&to)[4], const void* row) {
    if (TURNED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}

// 16 bytes from global to shared memory, which arrive later; zeros instead where not `there`, and then nothing is read.
__device__ inline void copy_later(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 : : "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// What was asked for since the last call becomes one group.
__device__ inline void end_group() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Until all groups but the last PENDING have arrived, as far as this thread asked for them.
template <int PENDING> __device__ inline void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

template <class T> __device__ inline unsigned two(float first, float second) {
    const T held[2] = {from_float<T>(first), from_float<T>(second)};
    unsigned bits;
    memcpy(&bits, held, 4);
    return bits;
}
