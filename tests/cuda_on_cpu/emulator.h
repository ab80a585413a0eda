// CUDA's kernel language on a CPU, for tests: the threads of a block are fibers that run in turns on one thread.
//
// A fiber runs until it must wait, for its warp (shuffles, matrix instructions) or its block, and a warp runs until it
// must wait for its block. Blocks run one after another. Which warp and fiber go first is chosen by `order`: 0 the
// first, 1 the last, others random ones, which also take turns before they must; so what a missing barrier hides in
// one order shows in another. Threads that wait for each other without end, and
// writes beyond the shared memory that was asked for, are errors.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static  // of fixed size; the other kind is written anew before compiling

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct dim3 {
    unsigned x, y, z;
};

namespace emulator {

constexpr size_t STACK = 128 * 1024, MOST_SHARED = 232 * 1024, GUARD = 4096;
enum State { READY, AT_WARP, AT_BLOCK, ENDED };

#ifdef __x86_64__
extern "C" void emulator_switch(void** save, void* to);
asm(R"(
.weak emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#endif

struct Fiber {
    State state = ENDED;
    dim3 index{};
    unsigned number = 0, operation = 0;
    std::unique_ptr<char[]> stack;
#ifdef __x86_64__
    void* context = nullptr;
#else
    ucontext_t context;
#endif
};

struct Posted {  // what a lane shows the others of its warp: by turns one and the other, so that slow ones can still read
    const void* address[2];
    unsigned value[2][8];
};

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Posted> posted;
    Fiber* now = nullptr;
    dim3 block{}, block_size{}, grid{};
    std::function<void()> kernel;
    std::string error;
    size_t n_shared = 0;
    int order = 0;
    alignas(128) unsigned char shared[MOST_SHARED + GUARD];
#ifdef __x86_64__
    void* main = nullptr;
#else
    ucontext_t main;
#endif
};

inline Machine machine;

inline void wait(State state) {
    machine.now->state = state;
#ifdef __x86_64__
    emulator_switch(&machine.now->context, machine.main);
#else
    swapcontext(&machine.now->context, &machine.main);
#endif
}

inline void body() {
    machine.kernel();
    wait(ENDED);
}

inline void prepare(Fiber& fiber) {
    if (!fiber.stack) fiber.stack.reset(new char[STACK]);
    fiber.state = READY;
    fiber.operation = 0;
#ifdef __x86_64__
    auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + STACK) & ~uintptr_t(15);
    void** place = reinterpret_cast<void**>(top) - 2;
    *place = reinterpret_cast<void*>(&body);  // where `ret` goes, with the stack as after a call
    fiber.context = place - 6;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, body, 0);
#endif
}

inline void resume(Fiber& fiber) {
    machine.now = &fiber;
#ifdef __x86_64__
    emulator_switch(&machine.main, fiber.context);
#else
    swapcontext(&machine.main, &fiber.context);
#endif
}

// Lets fibers first to last - 1 go on if all of them wait for each other; whether it did.
inline bool release(unsigned first, unsigned last, State state) {
    for (unsigned i = first; i < last; ++i)
        if (machine.fibers[i].state != state) return false;
    for (unsigned i = first; i < last; ++i) machine.fibers[i].state = READY;
    return true;
}

inline void run_block(int order, std::mt19937& random) {
    const unsigned n = machine.block_size.x * machine.block_size.y * machine.block_size.z;
    memset(machine.shared, 0xff, machine.n_shared);  // NaN
    memset(machine.shared + machine.n_shared, 0xa5, GUARD);
    std::vector<unsigned> warps(n / 32), lanes(32);
    for (unsigned i = 0; i < n; ++i) {
        Fiber& fiber = machine.fibers[i];
        fiber.number = i;
        fiber.index = {i % machine.block_size.x, i / machine.block_size.x % machine.block_size.y,
                       i / machine.block_size.x / machine.block_size.y};
        prepare(fiber);
    }
    for (unsigned i = 0; i < n / 32; ++i) warps[i] = order == 1 ? n / 32 - 1 - i : i;
    for (unsigned i = 0; i < 32; ++i) lanes[i] = order == 1 ? 31 - i : i;
    for (bool moved = true; moved;) {
        moved = false;
        if (order > 1) std::shuffle(warps.begin(), warps.end(), random);
        for (unsigned warp : warps)
            do {
                if (order > 1) std::shuffle(lanes.begin(), lanes.end(), random);
                for (unsigned lane : lanes)
                    if (machine.fibers[32 * warp + lane].state == READY) {
                        resume(machine.fibers[32 * warp + lane]);
                        moved = true;
                    }
            } while (release(32 * warp, 32 * warp + 32, AT_WARP) && (order < 2 || random() % 4));
        moved |= release(0, n, AT_BLOCK);
    }
    unsigned n_ended = 0;
    for (unsigned i = 0; i < n; ++i) n_ended += machine.fibers[i].state == ENDED;
    if (n_ended != n)
        machine.error = std::to_string(n - n_ended) + " of " + std::to_string(n) + " threads wait for others without end";
    for (size_t i = 0; i < GUARD; ++i)
        if (machine.shared[machine.n_shared + i] != 0xa5) machine.error = "a write beyond shared memory";
}

inline const char* run(
    std::function<void()> kernel, const unsigned* grid, const unsigned* block, size_t n_shared, int order
) {
    machine.error.clear();
    machine.grid = {grid[0], grid[1], 1};
    machine.block_size = {block[0], block[1], 1};
    if (block[0] * block[1] % 32) machine.error = "a block of threads that are no whole warps";
    if (n_shared > MOST_SHARED) machine.error = "more shared memory than there is";
    machine.n_shared = n_shared;
    machine.order = order;
    machine.kernel = std::move(kernel);
    if (machine.fibers.size() < block[0] * block[1]) machine.fibers.resize(block[0] * block[1]);
    machine.posted.resize(machine.fibers.size());
    std::mt19937 random(order);
    const uint64_t n_blocks = uint64_t(grid[0]) * grid[1];
    for (uint64_t i = 0; i < n_blocks && machine.error.empty(); ++i) {
        const uint64_t at = order == 1 ? n_blocks - 1 - i : i;
        machine.block = {unsigned(at % grid[0]), unsigned(at / grid[0]), 0};
        run_block(order, random);
    }
    return machine.error.c_str();
}

// What the kernel is given: one pointer for each argument, as CUDA's own launch takes it.
template <class... A, size_t... I> void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*reinterpret_cast<std::remove_const_t<A>*>(arguments[I])...);
}

template <class... A>
const char* launch(void (*kernel)(A...), void** arguments, const unsigned* grid, const unsigned* block, size_t n_shared,
                   int order) {
    return run([=] { call(kernel, arguments, std::index_sequence_for<A...>()); }, grid, block, n_shared, order);
}

inline void* shared() { return machine.shared; }

inline unsigned lane() { return machine.now->number % 32; }

// Shows `n` values and an address to the warp; what lane `i` showed is in shown(i) until the next call but one.
inline unsigned show(const void* address, const unsigned* values, int n) {
    const unsigned turn = machine.now->operation++ % 2;
    Posted& own = machine.posted[machine.now->number];
    own.address[turn] = address;
    for (int i = 0; i < n; ++i) own.value[turn][i] = values[i];
    wait(AT_WARP);
    return turn;
}

inline const Posted& shown(unsigned lane) { return machine.posted[machine.now->number / 32 * 32 + lane]; }

}  // namespace emulator

#define threadIdx (emulator::machine.now->index)
#define blockIdx (emulator::machine.block)
#define blockDim (emulator::machine.block_size)
#define gridDim (emulator::machine.grid)

inline void __syncthreads() { emulator::wait(emulator::AT_BLOCK); }
inline void __syncwarp() { emulator::wait(emulator::AT_WARP); }

inline float __shfl_xor_sync(unsigned, float value, int away) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    const unsigned turn = emulator::show(nullptr, &bits, 1);
    memcpy(&value, &emulator::shown(emulator::lane() ^ away).value[turn][0], 4);
    return value;
}

inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
