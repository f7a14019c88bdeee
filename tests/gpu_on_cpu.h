// As much of a GPU as the .cu files of fast/ need, on a CPU (x86_64 or aarch64, Linux). To be included before one of
// them.
//
// Every GPU thread is a fiber on one CPU thread. A fiber runs until it waits for something - a barrier, the
// other lanes of its warp, a value of another block - and then yields to the next. So this shows what the
// kernel computes and whether it ends, but not what a GPU's memory model would allow to happen in another
// order.
#include <array>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <ucontext.h>
#include <vector>


// ---- Fibers

constexpr int WARP_VALUE_WORDS = 5;                   // for the largest value that a lane brings

// A barrier of fibers: nobody leaves before `size` have come. Two sets of values, so that the fibers of the
// next round may bring theirs while those of this round still read.
struct Rendezvous {
    int arrived = 0;
    int round = 0;
    uint64_t values[2][32][WARP_VALUE_WORDS];

    void wait(int size);
};

struct Block {
    std::vector<char> shared_memory;
    int threads;
    Rendezvous warps[16];
    Rendezvous named_barriers[16];                    // 0 is that of __syncthreads
};

struct Fiber {
    const int *awaited;                               // it need not run before this is no longer `awaited_value`
    int awaited_value;
    bool started;
    bool done;
    int thread;
    int block_index;
    int block_index_y;
    Block *block;
    ucontext_t entry;
    jmp_buf resume_point;
    std::vector<std::array<void *, 2>> copies;        // destination and source of asynchronous copies
};

Fiber *running;
unsigned long long turns_so_far;                      // turns that every fiber has had, over all launches
jmp_buf scheduler;

// setcontext only enters a fiber; after that _setjmp and _longjmp switch, which need no system call.
[[gnu::noinline]] void yield() {
    if (!_setjmp(running->resume_point)) {
        _longjmp(scheduler, 1);
    }
}

[[gnu::noinline]] void resume(Fiber &fiber) {
    running = &fiber;
    if (_setjmp(scheduler)) {
        return;                                       // the fiber has yielded
    }
    if (fiber.started) {
        _longjmp(fiber.resume_point, 1);
    }
    fiber.started = true;
    setcontext(&fiber.entry);
}

void Rendezvous::wait(int size) {
    const int this_round = round;
    ++arrived;
    if (arrived == size) {
        arrived = 0;
        ++round;
    }
    if (round == this_round) {
        running->awaited = &round;
        running->awaited_value = this_round;
        yield();
        running->awaited = nullptr;
    }
}


// ---- CUDA's keywords, types and functions

#define ON_CPU
#define __constant__
#define __device__
#define __global__
#define __grid_constant__
#define __noinline__
#define __launch_bounds__(...)

struct uint2 {
    unsigned x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct ThreadIndex {
    struct {
        operator int() const { return running->thread; }
    } x;
} threadIdx;

struct BlockIndex {
    struct {
        operator int() const { return running->block_index; }
    } x;
    struct {
        operator int() const { return running->block_index_y; }
    } y;
} blockIdx;

template <class A, class B>
auto min(A a, B b) {
    using Common = std::common_type_t<A, B>;
    return (Common)a < (Common)b ? (Common)a : (Common)b;
}

template <class A, class B>
auto max(A a, B b) {
    using Common = std::common_type_t<A, B>;
    return (Common)a > (Common)b ? (Common)a : (Common)b;
}

float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The larger one of the lower halves, and of the upper halves.
unsigned __vmaxu2(unsigned x, unsigned y) {
    const unsigned low = (x & 0xffff) > (y & 0xffff) ? x : y;
    const unsigned high = x >> 16 > y >> 16 ? x : y;
    return (low & 0xffff) | (high & 0xffff0000);
}

// Only for the one selector that the kernel uses: the low halves of x and y.
unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    if (selector != 0x5410) {
        __builtin_trap();
    }
    return (x & 0xffff) | y << 16;
}

float rsqrtf(float x) {
    return 1 / sqrtf(x);
}

void __syncthreads() {
    running->block->named_barriers[0].wait(running->block->threads);
}

void __threadfence() {
}

unsigned atomicInc(unsigned *address, unsigned highest) {
    const unsigned old = *address;
    *address = old >= highest ? 0 : old + 1;
    return old;
}


// ---- What the lanes of a warp do together: each brings a value, all of them look at all values

template <class T, class Look>
auto with_all_lanes(T value, Look look) {
    Rendezvous &warp = running->block->warps[threadIdx.x / 32];
    auto &values = warp.values[warp.round % 2];
    static_assert(sizeof(T) <= sizeof values[0]);
    memcpy(values[threadIdx.x % 32], &value, sizeof value);
    warp.wait(32);
    return look([&](int lane) -> const T & { return *(const T *)values[lane]; });
}

template <class T>
T __shfl_sync(unsigned, T value, int source) {
    return with_all_lanes(value, [&](auto of_lane) { return of_lane(source); });
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
    return with_all_lanes(value, [&](auto of_lane) { return of_lane(threadIdx.x % 32 ^ distance); });
}

template <class T>
T __reduce_max_sync(unsigned, T value) {
    return with_all_lanes(value, [](auto of_lane) {
        T result = of_lane(0);
        for (int lane = 1; lane < 32; ++lane) {
            result = max(result, of_lane(lane));
        }
        return result;
    });
}

template <class T>
T __reduce_min_sync(unsigned, T value) {
    return with_all_lanes(value, [](auto of_lane) {
        T result = of_lane(0);
        for (int lane = 1; lane < 32; ++lane) {
            result = min(result, of_lane(lane));
        }
        return result;
    });
}

template <class T>
T __reduce_add_sync(unsigned, T value) {
    return with_all_lanes(value, [](auto of_lane) {
        T result = of_lane(0);
        for (int lane = 1; lane < 32; ++lane) {
            result += of_lane(lane);
        }
        return result;
    });
}

bool __all_sync(unsigned, bool value) {
    return __reduce_min_sync(~0u, (int)value);
}

void __syncwarp() {
    with_all_lanes(0, [](auto) { return 0; });
}


// ---- The functions that are PTX instructions in the kernels

template <class T>
T &dynamic_shared() {
    return *(T *)running->block->shared_memory.data();
}

template <class T>
T &static_shared() {
    return dynamic_shared<T>();
}

unsigned bits_of_bf16(float value) {                  // to nearest even
    const unsigned bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

unsigned pack_bf16x2(float low, float high) {
    return bits_of_bf16(low) | bits_of_bf16(high) << 16;
}

float half_of(unsigned pair, int i) {
    return __uint_as_float(i ? pair & 0xffff0000 : pair << 16);
}

unsigned fma_bf16x2(unsigned x, unsigned y, unsigned z) {
    const auto fma = [&](int i) { return half_of(x, i) * half_of(y, i) + half_of(z, i); };
    return pack_bf16x2(fma(0), fma(1));
}

void store_relaxed(void *address, unsigned value) {
    *(volatile unsigned *)address = value;
}

void store_relaxed_16(void *address, unsigned value) {
    *(volatile unsigned short *)address = value;
}

unsigned load_relaxed(const unsigned *address) {
    return *(const volatile unsigned *)address;
}

// A turn of all fibers counts as 0.1 ms.
unsigned long long global_timer() {
    return turns_so_far * 100'000;
}

uint4 load_relaxed_x4(const unsigned *address) {
    yield();
    const volatile unsigned *values = address;        // volatile: other fibers write them
    return {values[0], values[1], values[2], values[3]};
}

template <int BARRIER, int THREADS>
void named_barrier_sync() {
    running->block->named_barriers[BARRIER].wait(THREADS);
}

// An mbarrier: its phase ends when all arrivals and all expected bytes have come.
struct MBarrier {
    uint16_t arrivals;
    uint16_t missing_arrivals;
    uint32_t phase : 1;
    int32_t missing_bytes : 31;

    void end_phase_if_complete() {
        if (missing_arrivals == 0 && missing_bytes == 0) {
            missing_arrivals = arrivals;
            phase ^= 1;
        }
    }
};
static_assert(sizeof(MBarrier) == 8);

template <int ARRIVALS>
void mbarrier_init(unsigned long long *barrier) {
    *(MBarrier *)barrier = {ARRIVALS, ARRIVALS, 0, 0};
}

void mbarrier_arrive(unsigned long long *barrier) {
    MBarrier &it = *(MBarrier *)barrier;
    --it.missing_arrivals;
    it.end_phase_if_complete();
}

void mbarrier_arrive_expect_tx(unsigned long long *barrier, unsigned bytes) {
    MBarrier &it = *(MBarrier *)barrier;
    it.missing_bytes += bytes;
    mbarrier_arrive(barrier);
}

void mbarrier_complete_tx(void *barrier, unsigned bytes) {
    MBarrier &it = *(MBarrier *)barrier;
    it.missing_bytes -= bytes;
    it.end_phase_if_complete();
}

bool mbarrier_try_wait(unsigned long long *barrier, unsigned parity) {
    if (((volatile MBarrier *)barrier)->phase != parity) {
        return true;
    }
    yield();
    return false;
}

template <int BYTES>
void bulk_copy_to_shared(void *destination, const void *source, unsigned long long *barrier,
                         unsigned long long) {
    memcpy(destination, source, BYTES);
    mbarrier_complete_tx(barrier, BYTES);
}

void fence_proxy_async() {
}

// These copies are made as late as possible.
void async_copy_to_shared(void *destination, const void *source, unsigned long long) {
    running->copies.push_back({destination, (void *)source});
}

void wait_for_async_copies() {
    for (auto [destination, source] : running->copies) {
        memcpy(destination, source, 16);
    }
    running->copies.clear();
}

void mbarrier_arrive_after_copies(unsigned long long *barrier) {
    yield();
    wait_for_async_copies();
    mbarrier_arrive(barrier);
}

unsigned long long l2_policy(float) {
    return 0;
}

struct MmaOperands {
    unsigned a[4], b[2];
    float d[4];
};

// D[16][8] += A[16][16] * B[16][8]. Lane 4 r + q has of A the rows r and r + 8 at k = 2 q, 2 q + 1, 2 q + 8,
// 2 q + 9; of B column r at the same k; of D the rows r and r + 8 of the columns 2 q and 2 q + 1.
void multiply_tiles(uint64_t (&of_lanes)[32][WARP_VALUE_WORDS]) {
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const MmaOperands &own = *(MmaOperands *)of_lanes[lane];
        const int r = lane / 4;
        const int q = lane % 4;
        for (int i = 0; i < 2; ++i) {
            for (int upper_k = 0; upper_k < 2; ++upper_k) {
                const int k = 8 * upper_k + 2 * q + i;
                a[r][k] = half_of(own.a[2 * upper_k], i);
                a[r + 8][k] = half_of(own.a[2 * upper_k + 1], i);
                b[k][r] = half_of(own.b[upper_k], i);
            }
            d[r][2 * q + i] = own.d[i];
            d[r + 8][2 * q + i] = own.d[2 + i];
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
            for (int column = 0; column < 8; ++column) {
                d[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        float *own = ((MmaOperands *)of_lanes[lane])->d;
        for (int i = 0; i < 4; ++i) {
            own[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
        }
    }
}

// The lane that comes last multiplies for all of them.
void mma_m16n8k16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                  unsigned b1) {
    Rendezvous &warp = running->block->warps[threadIdx.x / 32];
    auto &values = warp.values[warp.round % 2];
    MmaOperands &own = *(MmaOperands *)values[threadIdx.x % 32];
    static_assert(sizeof own <= sizeof values[0]);
    own = {{a0, a1, a2, a3}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    if (warp.arrived == 31) {
        multiply_tiles(values);
    }
    warp.wait(32);
    memcpy(d, own.d, sizeof own.d);
}


// ---- Kernels that overlap, with boxes of tensors, rings of copies, products of a warpgroup: overlapped_stack.cu

char *own_memory() {
    return running->block->shared_memory.data();
}

unsigned shared_address(const void *pointer) {
    return (const char *)pointer - own_memory();
}

void let_next_kernel_begin() {
}

void wait_for_kernel_before() {
}

void fence_barrier_init() {
}

// In lines of 128 bytes, 16 bytes have other places in each of eight lines.
unsigned swizzled(unsigned address) {
    return address ^ (address / 128 % 8) * 16;
}

// What the arguments of cuTensorMapEncodeTiled are here, see tests/gpu_on_cpu.py.
struct EncodedTensorMap {
    uint64_t address, sizes[4], line_bytes[3], box[4];
};

// A box from (input, 0, 0, group) on; 0 for what is not in the tensor.
template <class TensorMap>
void copy_box(void *to, const TensorMap &map, int input, int group, unsigned long long &barrier) {
    const EncodedTensorMap &it = *(const EncodedTensorMap *)&map;
    unsigned at = shared_address(to);
    const unsigned end = at + it.box[0] * it.box[1] * it.box[2] * it.box[3] * 2;
    mbarrier_complete_tx(&barrier, end - at);         // nobody runs before the copy has ended
    for (uint64_t i = 0; at < end; ++i) {
        const uint64_t line[3] = {i % it.box[1], i / it.box[1] % it.box[2], group + i / it.box[1] / it.box[2]};
        const char *source = (const char *)it.address;
        bool is_inside = true;
        for (int axis = 0; axis < 3; ++axis) {
            source += line[axis] * it.line_bytes[axis];
            is_inside = is_inside && line[axis] < it.sizes[axis + 1];
        }
        for (unsigned first = input; first < input + it.box[0]; first += 8, at += 16) {
            char *vector = own_memory() + swizzled(at);
            is_inside && first < it.sizes[0] ? memcpy(vector, source + 2 * first, 16) : memset(vector, 0, 16);
        }
    }
}

// An offset in vectors of 16 bytes
unsigned long long matrix_descriptor(const void *address) {
    return shared_address(address) / 16;
}

float element(unsigned long long descriptor, int line, int k) {
    uint16_t bits;
    memcpy(&bits, own_memory() + swizzled(descriptor * 16 + line * 128 + 2 * k), 2);
    return half_of(bits, 0);
}

// D[64][2 N] += A[64][16] * B[16][2 N]. Lane 4 r + q of warp w has of D the rows 16 w + r and 16 w + r + 8 of the
// columns 8 i + 2 q and 8 i + 2 q + 1.
template <int N>
void wgmma(float (&d)[N], unsigned long long a, unsigned long long b) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    float of_rows[2][16];
    for (int i = 0; i < 32; ++i) {
        of_rows[i / 16][i % 16] = element(a, row + i / 16 * 8, i % 16);
    }
    for (int i = 0; i < N; ++i) {
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            d[i] += of_rows[i / 2 % 2][k] * element(b, column, k);
        }
    }
}

template <class TensorMap>
void copy_box_once(void *to, const TensorMap &map, int input, int group, unsigned long long &barrier) {
    copy_box(to, map, input, group, barrier);
}

void fence_wgmma() {
}

void commit_wgmma() {
}

template <int GROUPS>
void wait_for_wgmma() {
}

template <int N>
void pin(float (&)[N]) {
}

// As late as possible, and a group after the other: none has a destination.
void copy_vector(void *to, const uint4 *from) {
    running->copies.push_back({to, (void *)from});
}

void commit_vectors() {
    running->copies.push_back({nullptr, nullptr});
}

template <int GROUPS>
void wait_for_vectors() {
    auto &copies = running->copies;
    int groups = 0;
    for (auto [to, _] : copies) {
        groups += !to;
    }
    for (; groups > GROUPS; copies.erase(copies.begin())) {
        auto [to, from] = copies[0];
        if (to) {
            memcpy(to, from, 16);
        } else {
            --groups;
        }
    }
}

template <class Index>
void load_elements(unsigned (&d)[4], const void *row, Index index) {
    with_all_lanes(row, [&](auto of_lane) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            unsigned bits[2];
            for (int i = 0; i < 2; ++i) {
                const auto [line, column] = index(i);
                bits[i] = ((const uint16_t *)of_lane(8 * matrix + line))[column];
            }
            d[matrix] = bits[0] | bits[1] << 16;
        }
        return 0;
    });
    __syncwarp();                                     // nobody writes what others still read
}

void load_matrices(unsigned (&d)[4], const void *row) {
    const int lane = threadIdx.x % 32;
    load_elements(d, row, [&](int i) { return std::array<int, 2>{lane / 4, lane % 4 * 2 + i}; });
}

void load_matrices_transposed(unsigned (&d)[4], const void *row) {
    const int lane = threadIdx.x % 32;
    load_elements(d, row, [&](int i) { return std::array<int, 2>{lane % 4 * 2 + i, lane / 4}; });
}


// ---- A launch: 0 if all threads came to their end, 1 if they still wait after MAX_TURNS each

constexpr int MAX_TURNS = 200000;

struct BlockPosition {
    int x, y;
};

// These blocks at once. Shared memory begins as NaN.
template <class Arguments>
int run_blocks(void (*kernel)(Arguments), const void *arguments, const std::vector<BlockPosition> &positions,
               int threads, int shared_bytes) {
    constexpr size_t STACK_BYTES = 48 << 10;
    constexpr int TURNS = 4;                          // of a block's fibers in a row: their stacks stay in the cache
    static void (*the_kernel)(Arguments);
    static Arguments the_arguments;
    static std::unique_ptr<char[]> stacks;            // of which only what is used takes memory
    static size_t stack_bytes = 0;
    the_kernel = kernel;
    the_arguments = *(const Arguments *)arguments;
    void (*entry)() = [] {
        the_kernel(the_arguments);
        running->done = true;
        yield();
    };

    const int grid = positions.size();
    std::vector<Block> blocks(grid);
    for (Block &block : blocks) {
        block.shared_memory.assign(shared_bytes, 0xff);
        block.threads = threads;
    }
    std::vector<Fiber> fibers(grid * threads);
    if (stack_bytes < STACK_BYTES * fibers.size()) {
        stack_bytes = STACK_BYTES * fibers.size();
        stacks.reset();
        stacks.reset(new char[stack_bytes]);
    }
    for (size_t i = 0; i < fibers.size(); ++i) {
        Fiber &fiber = fibers[i];
        fiber.thread = i % threads;
        fiber.block_index = positions[i / threads].x;
        fiber.block_index_y = positions[i / threads].y;
        fiber.block = &blocks[i / threads];
        getcontext(&fiber.entry);
        fiber.entry.uc_stack.ss_sp = &stacks[STACK_BYTES * i];
        fiber.entry.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.entry, entry, 0);
    }

    for (int turn = 0; turn < MAX_TURNS; turn += TURNS) {
        turns_so_far += TURNS;
        bool all_done = true;
        for (int block = 0; block < grid; ++block) {
            for (int i = 0; i < TURNS * threads; ++i) {
                Fiber &fiber = fibers[block * threads + i % threads];
                if (!fiber.done && !(fiber.awaited && *fiber.awaited == fiber.awaited_value)) {
                    resume(fiber);
                }
                all_done = all_done && fiber.done;
            }
        }
        if (all_done) {
            return 0;
        }
    }
    return 1;
}

// Blocks that wait for each other
template <class Arguments>
int launch(void (*kernel)(Arguments), const void *arguments, int grid, int threads, int shared_bytes) {
    std::vector<BlockPosition> positions;
    for (int x = 0; x < grid; ++x) {
        positions.push_back({x, 0});
    }
    return run_blocks(kernel, arguments, positions, threads, shared_bytes);
}

// Blocks that do not, one after the other, in an order that is not that of their indices
template <class Arguments>
int launch_in_turn(void (*kernel)(Arguments), const void *arguments, int grid_x, int grid_y, int threads,
                   int shared_bytes) {
    constexpr long long STRIDE = 7919;                // prime, so that every block has its turn
    const int blocks = grid_x * grid_y;
    if (blocks % STRIDE == 0) {
        return 1;
    }
    for (int i = 1; i <= blocks; ++i) {
        const int index = i * STRIDE % blocks;
        const std::vector<BlockPosition> positions = {{index % grid_x, index / grid_x}};
        if (run_blocks(kernel, arguments, positions, threads, shared_bytes)) {
            return 1;
        }
    }
    return 0;
}
