// One token of each of ROWS rows through a stack of decoder layers, on Hopper GPUs. Every kernel starts while the
// previous ones are still running (programmatic dependent launch).
//
// overlapped_stack.py compiles this file with NVRTC for one model. It puts these definitions before it:
//
//     HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, EPSILON     of the stack
//     ROWS               32, 64 or 128
//     SLAB               inputs of a matrix that one step copies and multiplies
//     SPLITS             parts into which a product splits its inputs (split-K); gate_up does not
//     QKV_TILE           outputs of a block. These four also for OUTPUT, GATE_UP and DOWN.
//     QKV_WEIGHT_STAGES  steps whose weights are copied ahead
//     QKV_X_STAGES       steps whose activations are copied ahead
//     QKV_SHARED_BYTES   shared memory of a block
//     TILES_AHEAD        tiles of 16 positions that a warp copies ahead in attention
//
//
// One layer
// ---------
//     kernel               reads                    writes
//     ------------------   ----------------------   ------------------------------------------
//     qkv_product          x                        sums
//     attention            sums, keys, values       heads; one position of keys and of values
//     output_product       heads                    sums
//     sum_and_norm         sums, residual           residual, x
//     gate_up_product      x                        inner: silu(gate) * up
//     down_product         inner                    sums
//     sum_and_norm         sums, residual           residual, x
//
// `sums` are the partial sums of a product in float32, one for each of SPLITS equal parts of its inputs: a block that
// multiplies a part of the inputs reads few activations. The next kernel adds and rounds them. Results are rounded
// where the model's own forward rounds them.
//
// Each kernel allows the next one to launch at once, so the next one's blocks are scheduled as soon as a
// multiprocessor has room for them. First they copy to shared memory what no kernel of this pass writes: weights, or
// keys and values of earlier positions. Then they wait until the previous kernel has completed (and with it all
// earlier ones). Only after that they read what kernels of this pass write, and write anything themselves.
//
//
// A product
// ---------
// A block computes TILE outputs for one part of the inputs, SLAB inputs per step. One thread copies the weights and
// another one x, each into a ring of stages. Each warpgroup multiplies 64 outputs by all rows with wgmma. If TILE is
// not a multiple of 64, the last warpgroup also multiplies lines that are not weights; those results are not stored.

#define BULK_COPIES 1

#include "kernels.h"
#include "attention.h"
#include "barriers.h"


// ---- Sizes

constexpr int LINE_BYTES = 2 * SLAB;                  // one row of x or of weights in shared memory
constexpr int QUERY_SIZE = HEADS * HEAD_DIM;
constexpr int QKV_SIZE = QKV_HEADS * HEAD_DIM;
constexpr int HEAD_QUADS = HEAD_DIM / 4;              // groups of four bfloat16: one per lane of a warp
constexpr int HIDDEN_QUADS = HIDDEN / 4;              // one per thread of sum_and_norm
constexpr int ATTENTION_WARPS = OWN_HEADS;
constexpr int TILE_BYTES = WARP_POSITIONS * HEAD_DIM * 2;     // of keys, or of values

constexpr int COLUMNS = ROWS < 64 ? ROWS : 64;        // rows of one wgmma: its N
constexpr int COLUMN_PARTS = ROWS / COLUMNS;
using Sums = float[COLUMN_PARTS][COLUMNS / 2];        // the accumulators of a thread

static_assert(ROWS == 32 || ROWS % 64 == 0, "unsupported sizes: ROWS must be 32 or a multiple of 64");
static_assert(GROUP == 2, "unsupported sizes: HEADS must be 2 * KV_HEADS");

// A matrix of OUTPUTS_ x INPUTS_; a block multiplies TILE x INPUTS of it. In a gated one, groups of eight gates and of
// the eight ups that belong to them alternate.
template <int OUTPUTS_, int INPUTS_, int TILE_, int WEIGHT_STAGES_, int X_STAGES_, bool IS_GATED_ = false>
struct Matrix {
    static constexpr int OUTPUTS = OUTPUTS_, TILE = TILE_, WEIGHT_STAGES = WEIGHT_STAGES_, X_STAGES = X_STAGES_;
    static constexpr bool IS_GATED = IS_GATED_;
    static constexpr int PARTS = IS_GATED ? 1 : SPLITS;
    static constexpr int INPUTS = INPUTS_ / PARTS;
    static constexpr int STEPS = INPUTS / SLAB;
    static constexpr int WARPS = (TILE + 63) / 64 * 4;        // of the warpgroups that multiply
    static constexpr int THREADS = WARPS * 32 + 64;
    static_assert(INPUTS_ % (PARTS * SLAB) == 0 && OUTPUTS % TILE == 0 && TILE % 16 == 0,
                  "unsupported sizes: a matrix");
};
using Qkv = Matrix<QKV_SIZE, HIDDEN, QKV_TILE, QKV_WEIGHT_STAGES, QKV_X_STAGES>;
using Output = Matrix<HIDDEN, QUERY_SIZE, OUTPUT_TILE, OUTPUT_WEIGHT_STAGES, OUTPUT_X_STAGES>;
using GateUp = Matrix<2 * INNER, HIDDEN, GATE_UP_TILE, GATE_UP_WEIGHT_STAGES, GATE_UP_X_STAGES, true>;
using Down = Matrix<HIDDEN, INNER, DOWN_TILE, DOWN_WEIGHT_STAGES, DOWN_X_STAGES>;

template <class M>
struct alignas(1024) ProductShared {
    unsigned char weights[M::WEIGHT_STAGES][M::TILE * LINE_BYTES];     // 128-byte swizzle, as wgmma reads it
    unsigned char x[M::X_STAGES][ROWS * LINE_BYTES];
    bf16 gated[M::IS_GATED ? M::TILE / 16 : 1][ROWS][8];      // per warp: its eight outputs of each row
    u64 weights_here[M::WEIGHT_STAGES];
    u64 weights_read[M::WEIGHT_STAGES];
    u64 x_here[M::X_STAGES];
    u64 x_read[M::X_STAGES];
};
static_assert(sizeof(ProductShared<Qkv>) == QKV_SHARED_BYTES, "overlapped_stack.py counts other bytes");
static_assert(sizeof(ProductShared<Output>) == OUTPUT_SHARED_BYTES, "overlapped_stack.py counts other bytes");
static_assert(sizeof(ProductShared<GateUp>) == GATE_UP_SHARED_BYTES, "overlapped_stack.py counts other bytes");
static_assert(sizeof(ProductShared<Down>) == DOWN_SHARED_BYTES, "overlapped_stack.py counts other bytes");

struct alignas(1024) AttentionShared {
    unsigned char keys[ATTENTION_WARPS][TILES_AHEAD][TILE_BYTES];
    unsigned char values[ATTENTION_WARPS][TILES_AHEAD][TILE_BYTES];
    uint2 own[OWN_HEADS][HEAD_QUADS];
    float sum[ATTENTION_WARPS][GROUP][HEAD_DIM];
    float best[ATTENTION_WARPS + 1][GROUP];           // per warp; the last entry is the token's own position
    float weight[ATTENTION_WARPS + 1][GROUP];
};
static_assert(sizeof(AttentionShared) == ATTENTION_SHARED_BYTES, "overlapped_stack.py counts other bytes");

struct NormShared {
    float squares[HIDDEN_QUADS / 32];                 // per warp
};

// Each kernel uses one of these.
union Shared {
    ProductShared<Qkv> qkv;
    ProductShared<Output> output;
    ProductShared<GateUp> gate_up;
    ProductShared<Down> down;
    AttentionShared attention;
    NormShared norm;
};

struct alignas(64) TensorMap {
    u64 words[16];
};


// ---- Arguments

struct Product {
    const TensorMap *weights;                         // a box is TILE outputs x SLAB inputs
    const TensorMap *x;                               // a box is all rows x SLAB inputs
    void *result;                                     // sums: (SPLITS, ROWS, outputs), or inner: (ROWS, INNER)
};

struct Attention {
    const float *sums;                                // (SPLITS, ROWS, QKV_SIZE)
    const uint2 *q_norm;                              // (HEAD_DIM)
    const uint2 *k_norm;
    const uint2 *cos;                                 // (cache_length, HEAD_DIM)
    const uint2 *sin;                                 // the first half of each negated
    const i64 *positions;                             // (ROWS)
    u64 cache_length;
    uint4 *keys;                                      // (ROWS, KV_HEADS, cache_length, HEAD_DIM)
    uint4 *values;
    bf16 *heads;                                      // (ROWS, HEADS, HEAD_DIM)
};

struct SumAndNorm {
    const float *sums;                                // (SPLITS, ROWS, HIDDEN)
    const uint2 *residual;                            // (ROWS, HIDDEN)
    const uint2 *weight;                              // (HIDDEN)
    uint2 *total;                                     // (ROWS, HIDDEN); may be `residual`
    uint2 *x;                                         // (ROWS, HIDDEN)
};


// ---- PTX instructions. tests/gpu_on_cpu.h has functions of the same names for a CPU.

#ifndef ON_CPU

__device__ void let_next_kernel_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Wait until the previous kernel has completed and its writes are visible, to bulk copies as well.
__device__ void wait_for_kernel_before() {
    asm volatile("griddepcontrol.wait;\nfence.proxy.async.global;" ::: "memory");
}

__device__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Copy a box to shared memory, asynchronously.
__device__ void copy_box(void *to, const TensorMap &map, int input, int group, u64 &barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %3, %4}], [%5];"
                 :: "r"(shared_address(to)), "l"(&map), "r"(input), "r"(0), "r"(group), "r"(shared_address(&barrier))
                 : "memory");
}

// The same for data that a pass reads only once: it is evicted from L2 before data that is read again.
__device__ void copy_box_once(void *to, const TensorMap &map, int input, int group, u64 &barrier) {
    constexpr u64 EVICT_FIRST = 0x12f0000000000000;
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;"
                 :: "r"(shared_address(to)), "l"(&map), "r"(input), "r"(0), "r"(group), "r"(shared_address(&barrier)),
                    "l"(EVICT_FIRST)
                 : "memory");
}

// The wgmma descriptor of a matrix in shared memory: rows of 128 bytes, 128-byte swizzle, 1,024 bytes per eight rows.
__device__ u64 matrix_descriptor(const void *address) {
    return (u64)(shared_address(address) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// D[64 outputs][ROWS] += A[64 outputs][16 inputs] * B[16 inputs][ROWS]
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)

__device__ void wgmma(float (&d)[16], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
                 : SIXTEEN(d, 0) : "l"(a), "l"(b));
}

__device__ void wgmma(float (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, 1, 1, 1, 0, 0;"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16) : "l"(a), "l"(b));
}

__device__ void fence_wgmma() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ void commit_wgmma() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most GROUPS committed groups are still running.
template <int GROUPS>
__device__ void wait_for_wgmma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(GROUPS) : "memory");
}

// Keep the compiler from moving accesses to these registers across this point.
template <int N>
__device__ void pin(float (&d)[N]) {
#pragma unroll
    for (float &value : d) {
        asm volatile("" : "+f"(value) :: "memory");
    }
}

// Copy 16 bytes asynchronously.
__device__ void copy_vector(void *to, const uint4 *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory");
}

__device__ void commit_vectors() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int GROUPS>
__device__ void wait_for_vectors() {
    asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory");
}

// Load four matrices of 8 x 8 bfloat16. Lane l passes the address of row l % 8 of matrix l / 8. Lane 4 r + q receives
// the elements 2 q and 2 q + 1 of row r of each matrix; transposed, those of column r.
__device__ void load_matrices(u32 (&d)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}

__device__ void load_matrices_transposed(u32 (&d)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}

#endif

__device__ void wait_for_phase(u64 &barrier, u32 parity) {
    while (!mbarrier_try_wait(&barrier, parity)) {
    }
}

// A position in a ring of SIZE stages, and the parity of the mbarrier phase that ends when the stage is full.
template <int SIZE>
struct Stage {
    int index = 0;
    u32 parity = 0;

    __device__ void advance() {
        if (++index == SIZE) {
            index = 0;
            parity ^= 1;
        }
    }
};

// The totals of four neighbouring outputs over the SPLITS partial sums. A row has WIDTH outputs.
template <int WIDTH>
__device__ Quad sum_of_parts(const float *sums, int quad) {
    Quad part[SPLITS];
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) {
        part[i] = ((const Quad *)sums)[i * (ROWS * WIDTH / 4) + quad];
    }
#pragma unroll
    for (int i = 1; i < SPLITS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            part[0].v[j] += part[i].v[j];
        }
    }
    return part[0];
}


// ---- Products

template <int STAGES, int WARPS>
__device__ void init_ring(u64 (&here)[STAGES], u64 (&read)[STAGES]) {
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init<1>(&here[i]);
        mbarrier_init<WARPS>(&read[i]);
    }
}

// One thread copies all steps of a part of the inputs: it calls copy(stage, input, barrier) for each.
template <class M, int STAGES, int BYTES, class Copy>
__device__ void copy_steps(unsigned char (&stages)[STAGES][BYTES], u64 (&here)[STAGES], u64 (&read)[STAGES],
                           int first_input, Copy copy) {
    Stage<STAGES> stage;
    for (int step = 0; step < M::STEPS; ++step) {
        if (step >= STAGES) {
            wait_for_phase(read[stage.index], stage.parity ^ 1);
        }
        mbarrier_arrive_expect_tx(&here[stage.index], BYTES);
        copy(stages[stage.index], first_input + step * SLAB, here[stage.index]);
        stage.advance();
    }
}

// Lane 4 r + q has the outputs r and r + 8 of its warp's 16, for the rows 8 i + 2 q and 8 i + 2 q + 1.
template <class M>
__device__ void write_sums(const Product &arguments, int tile, int part, const Sums &sum) {
    const int first_output = tile * M::TILE + warp_index() * 16 + lane_index() / 4;
    float *sums = (float *)arguments.result + (u64)part * ROWS * M::OUTPUTS + first_output;
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
        const int row = i / 4 * 8 + lane_index() % 4 * 2 + i % 2;
        sums[row * M::OUTPUTS + i / 2 % 2 * 8] = sum[i / (COLUMNS / 2)][i % (COLUMNS / 2)];
    }
}

// Here the two outputs of a lane are a gate and its up. A warp collects its eight results of each row in shared memory
// and writes them as one vector of 16 bytes.
template <class M>
__device__ void write_inner(const Product &arguments, int tile, const Sums &sum) {
    bf16 (&gated)[ROWS][8] = ((ProductShared<M> &)dynamic_shared<Shared>()).gated[warp_index()];
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) {
        const int row = i / 2 * 8 + lane_index() % 4 * 2 + i % 2;
        const int of_gate = (i / 2 * 4 + i % 2) % (COLUMNS / 2);
        const float (&of_part)[COLUMNS / 2] = sum[i / (COLUMNS / 4)];
        const float activated = round_to_bf16(silu(round_to_bf16(of_part[of_gate])));
        gated[row][lane_index() / 4] = pack_bf16x2(activated * round_to_bf16(of_part[of_gate + 2]), 0);
    }
    __syncwarp();
    bf16 *inner = (bf16 *)arguments.result + tile * (M::TILE / 2) + warp_index() * 8;
    for (int row = lane_index(); row < ROWS; row += 32) {
        *(uint4 *)(inner + row * INNER) = *(uint4 *)gated[row];
    }
}

// Block i multiplies tile i / PARTS by part i % PARTS of the inputs.
template <class M>
__device__ void multiply(const Product &arguments) {
    constexpr int TILE_GROUPS = M::TILE / (M::IS_GATED ? 16 : 8);
    ProductShared<M> &shared = (ProductShared<M> &)dynamic_shared<Shared>();
    const int warp = __shfl_sync(~0u, warp_index(), 0);
    const int tile = blockIdx.x / M::PARTS;
    const int part = blockIdx.x % M::PARTS;
    let_next_kernel_begin();
    if (threadIdx.x == 0) {
        init_ring<M::WEIGHT_STAGES, M::WARPS>(shared.weights_here, shared.weights_read);
        init_ring<M::X_STAGES, M::WARPS>(shared.x_here, shared.x_read);
        fence_barrier_init();
    }
    __syncthreads();

    if (warp == M::WARPS) {
        if (lane_index() == 0) {
            copy_steps<M>(shared.weights, shared.weights_here, shared.weights_read, part * M::INPUTS,
                          [&](void *stage, int input, u64 &here) {
                copy_box_once(stage, *arguments.weights, input, tile * TILE_GROUPS, here);
            });
        }
        return;
    }
    if (warp > M::WARPS) {
        if (lane_index() == 0) {
            wait_for_kernel_before();
            copy_steps<M>(shared.x, shared.x_here, shared.x_read, part * M::INPUTS,
                          [&](void *stage, int input, u64 &here) {
                copy_box(stage, *arguments.x, input, 0, here);
            });
        }
        return;
    }

    Sums sum = {};
    Stage<M::WEIGHT_STAGES> of_weights;
    Stage<M::X_STAGES> of_x;
    u64 *read[2] = {};                                // the barriers of the previous step's stages
    for (auto &part : sum) {
        pin(part);
    }
#pragma unroll 1
    for (int step = 0; step < M::STEPS; ++step) {
        wait_for_phase(shared.weights_here[of_weights.index], of_weights.parity);
        wait_for_phase(shared.x_here[of_x.index], of_x.parity);
        __syncwarp();
        const u64 a = matrix_descriptor(shared.weights[of_weights.index] + warp / 4 * 64 * LINE_BYTES);
        const u64 b = matrix_descriptor(shared.x[of_x.index]);
        fence_wgmma();
#pragma unroll
        for (int k = 0; k < SLAB / 16; ++k) {
            // Descriptors count 16 bytes: a step of k is 32 bytes further, a part COLUMNS lines.
#pragma unroll
            for (int i = 0; i < COLUMN_PARTS; ++i) {
                wgmma(sum[i], a + 2 * k, b + 2 * k + i * (COLUMNS * LINE_BYTES / 16));
            }
        }
        commit_wgmma();
        if (step > 0) {
            wait_for_wgmma<1>();
            if (lane_index() == 0) {
                mbarrier_arrive(read[0]);
                mbarrier_arrive(read[1]);
            }
        }
        read[0] = &shared.weights_read[of_weights.index];
        read[1] = &shared.x_read[of_x.index];
        of_weights.advance();
        of_x.advance();
    }
    wait_for_wgmma<0>();
    for (auto &part : sum) {
        pin(part);
    }
    if (warp * 16 < M::TILE) {
        if constexpr (M::IS_GATED) {
            write_inner<M>(arguments, tile, sum);
        } else {
            write_sums<M>(arguments, tile, part, sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(Qkv::THREADS) qkv_product(Product arguments) {
    multiply<Qkv>(arguments);
}

extern "C" __global__ void __launch_bounds__(Output::THREADS) output_product(Product arguments) {
    multiply<Output>(arguments);
}

extern "C" __global__ void __launch_bounds__(GateUp::THREADS) gate_up_product(Product arguments) {
    multiply<GateUp>(arguments);
}

extern "C" __global__ void __launch_bounds__(Down::THREADS) down_product(Product arguments) {
    multiply<Down>(arguments);
}


// ---- The total of a product's partial sums, plus the residual, and its RMS norm. The total and the sum are rounded.
// Block b computes row b, a thread four values.

extern "C" __global__ void __launch_bounds__(HIDDEN_QUADS) sum_and_norm(SumAndNorm arguments) {
    let_next_kernel_begin();
    const int quad = blockIdx.x * HIDDEN_QUADS + threadIdx.x;
    const uint2 weight = arguments.weight[threadIdx.x];
    wait_for_kernel_before();
    const uint2 total = add(pack(sum_of_parts<HIDDEN>(arguments.sums, quad)), arguments.residual[quad]);
    arguments.total[quad] = total;
    const float squares = block_sum(dot(unpack(total), unpack(total)), dynamic_shared<Shared>().norm.squares);
    arguments.x[quad] = normalize(total, rsqrtf(squares / HIDDEN + EPSILON), weight);
}


// ---- Attention

// The address of a vector in a tile of keys or values. The swizzle puts the same vector of eight neighbouring rows into
// different banks.
__device__ unsigned char *place_of(unsigned char *tile, int row, int vector) {
    return tile + (row * HEAD_VECTORS + (vector ^ row % 8)) * sizeof(uint4);
}

// The row that this lane passes to load_matrices for 16 dimensions of 16 positions: matrices 0 and 1 are the first and
// the last eight dimensions of the positions 0 to 7, matrices 2 and 3 those of the positions 8 to 15.
__device__ const void *matrices_of(unsigned char *tile, int part) {
    const int matrix = lane_index() / 8;
    return place_of(tile, matrix / 2 * 8 + lane_index() % 8, 2 * part + matrix % 2);
}

// Block i computes KV head i % KV_HEADS of row i / KV_HEADS. The warps take tiles of 16 earlier positions in turn and
// copy TILES_AHEAD of them ahead. Warp i also loads head i of the token itself: its queries, its key or its value. The
// token's own position is added at the end, when the results of the warps are merged.
//
// Tensor cores multiply queries by keys, and weights by values. They take bfloat16, so a weight is split into its
// rounded value and the rest, which are multiplied separately and added. Of the rows of the query matrix, 0 and 1 are
// the two query heads, 2 and 3 repeat them for the rest of their weights, and the others are 0.
//
//     lane 4 r + q has     scores of matrix row r, for the positions 2 q, 2 q + 1, 2 q + 8, 2 q + 9
//                          sums of the dimensions r and r + 8 of every 16, for matrix rows 2 q and 2 q + 1
extern "C" __global__ void __launch_bounds__(ATTENTION_WARPS * 32) attention(Attention arguments) {
    AttentionShared &shared = dynamic_shared<Shared>().attention;
    let_next_kernel_begin();
    const int row = blockIdx.x / KV_HEADS;
    const int kv_head = blockIdx.x % KV_HEADS;
    const int warp = __shfl_sync(~0u, warp_index(), 0);
    const int lane = lane_index();
    const int r = lane / 4;
    const int q = lane % 4;
    const int position = arguments.positions[row];
    const u64 in_cache = blockIdx.x * arguments.cache_length * HEAD_VECTORS;
    uint4 *keys = arguments.keys + in_cache;
    uint4 *values = arguments.values + in_cache;
    const int tiles = (position + WARP_POSITIONS - 1) / WARP_POSITIONS;

    // Lines past the end repeat the last position; their weights are 0.
    const auto copy_tile = [&](int tile, int stage) {
        if (tile < tiles) {
#pragma unroll
            for (int i = 0; i < WARP_POSITIONS / 2; ++i) {
                const int line = 2 * i + lane / 16;
                const int vector = lane % 16;
                const int from = min(tile * WARP_POSITIONS + line, position - 1) * HEAD_VECTORS + vector;
                copy_vector(place_of(shared.keys[warp][stage], line, vector), keys + from);
                copy_vector(place_of(shared.values[warp][stage], line, vector), values + from);
            }
        }
        commit_vectors();
    };
    for (int i = 0; i < TILES_AHEAD; ++i) {
        copy_tile(warp + i * ATTENTION_WARPS, i);
    }

    const uint2 norm_weight = (warp < GROUP ? arguments.q_norm : arguments.k_norm)[lane];
    const uint2 cos = arguments.cos[position * HEAD_QUADS + lane];
    const uint2 sin = arguments.sin[position * HEAD_QUADS + lane];
    wait_for_kernel_before();
    const int own_quad = (row * QKV_HEADS + own_head(kv_head, warp)) * HEAD_QUADS + lane;
    uint2 own = pack(sum_of_parts<QKV_SIZE>(arguments.sums, own_quad));
    if (warp <= GROUP) {
        own = norm_and_rope<32>(own, norm_weight, cos, sin, EPSILON);
    }
    shared.own[warp][lane] = own;
    if (warp >= GROUP) {
        ((uint2 *)(warp == GROUP ? keys : values))[position * HEAD_QUADS + lane] = own;
    }
    __syncthreads();

    u32 query[HEAD_DIM / 16][2];
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 16; ++part) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            query[part][i] = r < 2 * GROUP ? ((const u32 *)shared.own[r % GROUP])[8 * part + 4 * i + q] : 0;
        }
    }
    float sum[HEAD_DIM / 16][4] = {};
    float best = LOWEST_SCORE;
    float weight = 0;                                 // of this lane's positions
    int stage = 0;
#pragma unroll 1
    for (int tile = warp; tile < tiles; tile += ATTENTION_WARPS) {
        wait_for_vectors<TILES_AHEAD - 1>();
        __syncwarp();
        float product[2][4] = {};                     // of the positions 0 to 7 and 8 to 15
#pragma unroll
        for (int part = 0; part < HEAD_DIM / 16; ++part) {
            u32 key[4];
            load_matrices(key, matrices_of(shared.keys[warp][stage], part));
            mma_m16n8k16(product[0], query[part][0], 0, query[part][1], 0, key[0], key[1]);
            mma_m16n8k16(product[1], query[part][0], 0, query[part][1], 0, key[2], key[3]);
        }

        float score[4];
        float new_best = best;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = tile * WARP_POSITIONS + i / 2 * 8 + 2 * q + i % 2;
            score[i] = at < position ? product[i / 2][i % 2] * rsqrtf(HEAD_DIM) : LOWEST_SCORE;
            new_best = fmaxf(new_best, score[i]);
        }
        new_best = warp_max<4>(new_best);
        const float rescale = expf(best - new_best);
        best = new_best;
        weight *= rescale;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            score[i] = expf(score[i] - best);         // 0 past the end
            weight += score[i];
        }
        const float rescale_of_heads[2] = {__shfl_sync(~0u, rescale, 0), __shfl_sync(~0u, rescale, 4)};
        u32 of_values[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 rounded = pack_bf16x2(score[2 * i], score[2 * i + 1]);
            const u32 rest = pack_bf16x2(score[2 * i] - low_half(rounded), score[2 * i + 1] - high_half(rounded));
            of_values[i] = r < GROUP ? rounded : rest;
        }
#pragma unroll
        for (int part = 0; part < HEAD_DIM / 16; ++part) {
            u32 value[4];
            load_matrices_transposed(value, matrices_of(shared.values[warp][stage], part));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[part][i] *= rescale_of_heads[i % 2];
            }
            mma_m16n8k16(sum[part], value[0], value[1], value[2], value[3], of_values[0], of_values[1]);
        }
        __syncwarp();
        copy_tile(tile + TILES_AHEAD * ATTENTION_WARPS, stage);
        stage = (stage + 1) % TILES_AHEAD;
    }

    weight = warp_sum<4>(weight);
    if (q == 0 && r < GROUP) {
        shared.best[warp][r] = best;
        shared.weight[warp][r] = weight;
    }
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 16; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float both = sum[part][i] + __shfl_xor_sync(~0u, sum[part][i], 1);
            if (q == 0) {
                shared.sum[warp][i % 2][16 * part + i / 2 * 8 + r] = both;
            }
        }
    }
    if (warp < GROUP) {
        const float own_product = warp_sum(dot(unpack(shared.own[warp][lane]), unpack(shared.own[GROUP][lane])));
        if (lane == 0) {
            shared.best[ATTENTION_WARPS][warp] = own_product * rsqrtf(HEAD_DIM);
            shared.weight[ATTENTION_WARPS][warp] = 1;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += ATTENTION_WARPS * 32) {
        const int head = i / HEAD_DIM;
        const int dimension = i % HEAD_DIM;
        const float own_value = low_half(((const bf16 *)shared.own[GROUP + 1])[dimension]);
        const PartialAttention all = merge_attention(ATTENTION_WARPS + 1, [&](int i) -> PartialAttention {
            return {shared.best[i][head], shared.weight[i][head],
                    i < ATTENTION_WARPS ? shared.sum[i][head][dimension] : own_value};
        });
        arguments.heads[blockIdx.x * GROUP * HEAD_DIM + i] = pack_bf16x2(all.sum / all.weight, 0);
    }
}
