// As much of a GPU as fused_layers.cu asks for, on a CPU: every thread is a fiber, and gives way to the others wherever
// it waits. gpu_on_cpu.py puts calls of these functions in the place of PTX. How a GPU orders memory is not shown.
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
template <class A, class B> auto min(A a, B b) { std::common_type_t<A, B> x = a, y = b; return x < y ? x : y; }
template <class A, class B> auto max(A a, B b) { std::common_type_t<A, B> x = a, y = b; return x > y ? x : y; }
float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
unsigned __byte_perm(unsigned x, unsigned y, unsigned) { return (x & 0xffff) | y << 16; }
float rsqrtf(float x) { return 1 / sqrtf(x); }

struct Meeting {                                                  // of fibers; nobody leaves before all are there
    int arrived = 0, round = 0;
    uint64_t brought[2][32][3];
    void meet(int size);
};
struct Barrier { uint16_t count, missing; uint32_t phase; };
struct Block { std::vector<char> memory; int threads; Meeting warps[9], workers, all; };
struct Fiber { ucontext_t start; jmp_buf place; int thread, block; Block *of; bool begun, done; };
Fiber *running;
jmp_buf scheduler;
struct { struct { operator int() const { return running->thread; } } x; } threadIdx;
struct { struct { operator int() const { return running->block; } } x; } blockIdx;

// Contexts only to begin: jumps cost no system call.
[[gnu::noinline]] void give_way() { if (!_setjmp(running->place)) _longjmp(scheduler, 1); }
[[gnu::noinline]] void go_on(Fiber &fiber) {
    running = &fiber;
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true, setcontext(&fiber.start);
}
void Meeting::meet(int size) {
    const int now = round;
    if (++arrived == size) arrived = 0, ++round;
    else while (round == now) give_way();
}
char *block_memory() { return running->of->memory.data(); }
unsigned __cvta_generic_to_shared(const void *p) { return (const char *)p - block_memory(); }
void __syncthreads() { running->of->all.meet(running->of->threads); }

// ---- what a warp does together: each lane brings a value and sees those of all
template <class T, class See> auto together(T mine, See see) {
    Meeting &warp = running->of->warps[threadIdx.x / 32];
    auto &all = warp.brought[warp.round % 2];
    memcpy(all[threadIdx.x % 32], &mine, sizeof mine);
    warp.meet(32);
    return see([&](int lane) -> const T & { return *(const T *)all[lane]; });
}
template <class T, class Join> T reduce(T mine, Join join) {
    return together(mine, [&](auto of) { T x = of(0); for (int i = 1; i < 32; ++i) x = join(x, of(i)); return x; });
}
template <class T> T __shfl_xor_sync(unsigned, T x, int other) {
    return together(x, [&](auto of) { return of(threadIdx.x % 32 ^ other); });
}
template <class T> T __reduce_max_sync(unsigned, T x) { return reduce(x, [](T a, T b) { return max(a, b); }); }
template <class T> T __reduce_add_sync(unsigned, T x) { return reduce(x, [](T a, T b) { return a + b; }); }
void __syncwarp() { together(0, [](auto) { return 0; }); }

// ---- PTX
unsigned to_bf16(float f) { const unsigned u = __float_as_uint(f); return (u + 0x7fff + (u >> 16 & 1)) >> 16; }
float half_of(unsigned pair, int i) { return __uint_as_float(i ? pair & 0xffff0000 : pair << 16); }
void load(unsigned &x, unsigned &y, unsigned &z, unsigned &w, const unsigned *from) {
    give_way();
    x = from[0], y = from[1], z = from[2], w = from[3];
}
// a 16 by 16, b 16 by 8: lane 4 r + q has of a the rows r and r + 8 and the columns 2 q, 2 q + 8 and their neighbours
void mma(float &d0, float &d1, float &d2, float &d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
         unsigned b1) {
    struct Part { unsigned a[4], b[2]; };
    together(Part{{a0, a1, a2, a3}, {b0, b1}}, [&](auto of) {
        const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
        float *d[4] = {&d0, &d1, &d2, &d3};
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 16; ++k)
                *d[i] += half_of(of(row * 4 + k % 8 / 2).a[i / 2 + k / 8 * 2], k % 2) *
                         half_of(of((column + i % 2) * 4 + k % 8 / 2).b[k / 8], k % 2);
        return 0;
    });
}
Barrier &barrier(unsigned at) { return *(Barrier *)(block_memory() + at); }
void start_barrier(unsigned at, uint16_t count) { barrier(at) = {count, count, 0}; }
void arrive(unsigned at) { if (Barrier &b = barrier(at); --b.missing == 0) b.missing = b.count, ++b.phase; }
unsigned try_wait(unsigned at, unsigned parity) {
    if (barrier(at).phase % 2 == parity) give_way();
    return barrier(at).phase % 2 != parity;
}
void bring(unsigned full, unsigned to, const char *from) { memcpy(block_memory() + to, from, 2048), arrive(full); }

// ---- a launch: 0 if all threads came to their end
template <class Arguments> int launch(void (*kernel)(const Arguments *), const void *arguments, int grid, int threads,
                                      int memory) {
    constexpr int STACK = 48 << 10;
    static decltype(kernel) the_kernel;
    static const Arguments *the_arguments;
    the_kernel = kernel, the_arguments = (const Arguments *)arguments;
    void (*run)() = [] { the_kernel(the_arguments), running->done = true, give_way(); };
    std::vector<Block> blocks(grid);
    std::vector<Fiber> fibers(grid * threads);
    std::vector<char> stacks((size_t)STACK * fibers.size());
    for (auto &block : blocks) block.memory.resize(memory), block.threads = threads;
    for (int i = 0; i < (int)fibers.size(); ++i) {
        Fiber &fiber = fibers[i];
        fiber.thread = i % threads, fiber.block = i / threads, fiber.of = &blocks[fiber.block];
        getcontext(&fiber.start);
        fiber.start.uc_stack = {&stacks[(size_t)STACK * i], 0, STACK};
        makecontext(&fiber.start, run, 0);
    }
    for (int round = 0; round < 20000; ++round) {
        int left = 0;
        for (auto &fiber : fibers)
            if (!fiber.done) go_on(fiber), left += !fiber.done;
        if (!left) return 0;
    }
    return 1;
}
