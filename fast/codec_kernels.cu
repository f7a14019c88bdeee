// What lies between the matrix products and convolutions of the codec's decoder. Tensors are channels-last: a
// column of C channels is contiguous.
//
// codec_kernels.py compiles this file with NVRTC for one GPU and one model. It puts these definitions before it:
//
//     CODEBOOK, CODE_DIM           entries of a codebook, and their size
//     HIDDEN, INNER, NORM_EPSILON  of the transformer, and of its norms
//     HEADS, WINDOW, RING          of its attention: positions that a query sees, and that are stored
//     MAX_FRAMES                   of a chunk
//     LATENT, EPSILON              channels of the ConvNeXt blocks, and the epsilon of their norm
//     LAST                         channels of the last convolution's input
//     THREADS                      of a block of activate and to_samples
//
// codec_kernels_reference.py has the kernels in a few lines of torch. Values are rounded to bfloat16 where the
// model's own modules round them: after every product and every sum outside of matrix products.
//
//
// A layer of the transformer
// --------------------------
//     kernel              reads                              writes
//     -----------------   --------------------------------   ------------------------------------
//     (GEMM)              normalized                         qkv
//     window_attention    qkv, cos, sin, keys and values     output; new keys and values
//     (GEMM)              output                             x
//     add_and_norm        x, its scale, residual             residual, normalized
//     (GEMM)              normalized                         gate_up
//     silu_and_multiply   gate_up                            inner
//     (GEMM)              inner                              x
//     add_and_norm        x, its scale, residual             residual, normalized
//
//
// A residual unit
// ---------------
//     kernel          reads                              writes
//     -------------   --------------------------------   ------------------------------------------------------
//     activate        product and bias of the unit       their sum, the residual of this unit; its SnakeBeta
//                     before, its residual, state        behind the columns of `state`; the new state
//     (convolution)   7 columns, with dilation           product
//     activate        product, bias                      SnakeBeta of their sum
//     (GEMM)                                             product, for the next `activate`
//
// A causal convolution looks back at the columns before the first: `state` keeps them, P for each slot.
// `activate` writes them in front of the new columns, and keeps the last P columns for the next chunk.
//
// A convolution with dilation D reads every D-th column. So that it needs none, `activate` writes its input
// interleaved: D sequences, sequence r of the columns r, r + D, r + 2 D, ..., each as long as the first. What
// comes of it has the same order until the next `activate` puts it right. A shorter sequence ends in a column of
// zeros: convolutions that are computed in tiles would spread a NaN.
//
// In the comments, a vector is 8 consecutive channels: 16 bytes, what a thread loads at once (uint4).

using bf16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;


// ---- Sizes

constexpr int HEAD_DIM = 64;
constexpr int HIDDEN_VECTORS = HIDDEN / 8;
constexpr int HIDDEN_WARPS = HIDDEN_VECTORS / 32;
constexpr int INNER_VECTORS = INNER / 8;
constexpr int CODE_VECTORS = CODE_DIM / 8;
constexpr int ATTENTION_WARPS = 4;
constexpr int ATTENTION_THREADS = 32 * ATTENTION_WARPS;
constexpr int KEYS_PER_LANE = (WINDOW + 31) / 32;
constexpr int MAX_KEYS = WINDOW - 1 + MAX_FRAMES;
constexpr float LOWEST_SCORE = -1e30f;
constexpr int TAPS = 7;                               // of the convolutions in depthwise_norm and to_samples
constexpr int LATENT_VECTORS = LATENT / 8;
constexpr int LATENT_WARPS = LATENT_VECTORS / 32;
constexpr int LAST_VECTORS = LAST / 8;
constexpr int SAMPLES_OF_BLOCK = THREADS / 2;

static_assert(HIDDEN % 256 == 0, "unsupported sizes: HIDDEN must be a multiple of 256");    // whole warps
static_assert(HIDDEN <= 8192, "unsupported sizes: HIDDEN must be at most 8192");            // threads
static_assert(INNER % 8 == 0, "unsupported sizes: INNER must be a multiple of 8");
static_assert(CODE_DIM % 8 == 0, "unsupported sizes: CODE_DIM must be a multiple of 8");
static_assert(RING >= WINDOW - 1 && RING >= MAX_FRAMES, "unsupported sizes: RING is too short");
static_assert(LATENT % 256 == 0, "unsupported sizes: LATENT must be a multiple of 256");    // whole warps
static_assert(LATENT <= 8192, "unsupported sizes: LATENT must be at most 8192");            // threads
static_assert(LAST % 8 == 0, "unsupported sizes: LAST must be a multiple of 8");


// ---- Arguments, a struct for each kernel. codec_kernels.py writes them and checks their layout when it compiles.

#ifdef __CUDACC_RTC__  // NVRTC of CUDA 12 does not know __builtin_offsetof
#define OFFSET_OF(type, field) __INTADDR__(&((type *)0)->field)
#else
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif

// Pointers marked "or null" are for steps that are left out.
struct EmbedCodes {
    const i64 *codes;                                 // (B, Q, T)
    const uint4 *tables;                              // (Q, CODEBOOK, CODE_DIM)
    uint4 *semantic;                                  // (B, T, CODE_DIM), sum over the first codebooks
    uint4 *acoustic;                                  // (B, T, CODE_DIM), sum over the others
    u64 codebooks;                                    // Q
    u64 semantic_codebooks;
    u64 frames;                                       // T
};

struct AddAndNorm {
    const uint4 *x;                                   // (B, T, HIDDEN)
    const uint4 *scale;                               // (HIDDEN), or null
    const uint4 *residual;                            // (B, T, HIDDEN), or null
    const uint4 *weight;                              // (HIDDEN)
    uint4 *sum;                                       // (B, T, HIDDEN), or null
    uint4 *normalized;                                // (B, T, HIDDEN)
};

struct WindowAttention {
    const bf16 *qkv;                                  // (B, T, 3, HEADS, HEAD_DIM)
    const bf16 *cos;                                  // (B, T, HEAD_DIM)
    const bf16 *sin;                                  // (B, T, HEAD_DIM)
    const i64 *positions;                             // (slots), of the first new frame
    const i64 *slots;                                 // (B)
    bf16 *keys;                                       // (slots, HEADS, RING, HEAD_DIM), position p at p % RING
    bf16 *values;                                     // (slots, HEADS, RING, HEAD_DIM)
    bf16 *output;                                     // (B, T, HEADS, HEAD_DIM)
    u64 frames;                                       // T
};

struct SiluAndMultiply {
    const uint4 *gate_up;                             // (B, T, 2, INNER)
    uint4 *inner;                                     // (B, T, INNER)
    u64 vectors;                                      // of all of `inner`
};

struct Activate {
    const uint4 *x;                                   // (B, L, C), interleaved
    const uint4 *bias;                                // (C), or null
    const uint4 *scale;                               // (C), or null
    const uint4 *residual;                            // (B, L, C), or null
    const uint4 *alpha;                               // (C), or null
    const uint4 *inverse_beta;                        // (C), or null
    uint4 *sum;                                       // (B, L, C), or null
    uint4 *state;                                     // (slots, P, C), or null
    const i64 *slots;                                 // (B), or null
    uint4 *output;                                    // (B, P + L, C), interleaved
    u64 columns;                                      // L
    u64 state_columns;                                // P
    u64 vectors;                                      // C / 8
    u64 x_sequences;                                  // of the interleaving of x, 1: none
    u64 output_sequences;                             // of the interleaving of the output
};

struct DepthwiseNorm {
    const uint4 *x;                                   // (B, TAPS - 1 + L, LATENT)
    const uint4 *weight;                              // (TAPS, LATENT)
    const uint4 *bias;                                // (LATENT)
    const uint4 *norm_weight;                         // (LATENT)
    const uint4 *norm_bias;                           // (LATENT)
    uint4 *output;                                    // (B, L, LATENT)
    u64 columns;                                      // L
};

struct ToSamples {
    const uint4 *x;                                   // (B, TAPS - 1 + L, LAST)
    const uint4 *weight;                              // (TAPS, LAST)
    const bf16 *bias;                                 // (1)
    bf16 *output;                                     // (B, L)
    u64 columns;                                      // L
};


// ---- PTX instructions, and memory of a block
// For a run on a CPU, tests/gpu_on_cpu.h, included before this file, defines functions of the same names.

#ifdef CODEC_KERNELS_ON_CPU
template <class T>
T &shared() {
    return *(T *)dynamic_shared_memory();
}
#else

// The shared memory of a block, as the one type T that its kernel has there.
template <class T>
__device__ T &shared() {
    __shared__ T memory;
    return memory;
}

// Two floats, rounded to nearest even, as low and high half of a register.
__device__ u32 pack_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// x * y + z of two pairs of bfloat16, rounded once.
__device__ u32 fma_bf16x2(u32 x, u32 y, u32 z) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
    return result;
}

#endif


// ---- Small helpers

__device__ float low_half(u32 pair) {
    return __uint_as_float(pair << 16);
}

__device__ float high_half(u32 pair) {
    return __uint_as_float(pair & 0xffff0000);
}

__device__ float round_to_bf16(float x) {
    return low_half(pack_bf16x2(x, 0));
}

// A vector as floats
struct alignas(16) Eight {
    float v[8];
};

__device__ Eight unpack(uint4 x) {
    return {low_half(x.x), high_half(x.x), low_half(x.y), high_half(x.y),
            low_half(x.z), high_half(x.z), low_half(x.w), high_half(x.w)};
}

__device__ uint4 pack(Eight x) {
    return {pack_bf16x2(x.v[0], x.v[1]), pack_bf16x2(x.v[2], x.v[3]),
            pack_bf16x2(x.v[4], x.v[5]), pack_bf16x2(x.v[6], x.v[7])};
}

// The vector of function(0) to function(7), rounded.
template <class Function>
__device__ uint4 rounded(Function function) {
    Eight result;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        result.v[i] = function(i);
    }
    return pack(result);
}

// Sums and products of vectors, rounded as if computed in float: bfloat16 have 8 bits, so that a float holds
// their product exactly, and their sum unless one is too small to matter.
__device__ uint4 add(uint4 x, uint4 y) {
    constexpr u32 ONES = 0x3f803f80;
    return {fma_bf16x2(x.x, ONES, y.x), fma_bf16x2(x.y, ONES, y.y),
            fma_bf16x2(x.z, ONES, y.z), fma_bf16x2(x.w, ONES, y.w)};
}

__device__ uint4 multiply(uint4 x, uint4 y) {
    constexpr u32 ZEROS = 0x80008000;                 // -0, which leaves a product of either zero as it is
    return {fma_bf16x2(x.x, y.x, ZEROS), fma_bf16x2(x.y, y.y, ZEROS),
            fma_bf16x2(x.z, y.z, ZEROS), fma_bf16x2(x.w, y.w, ZEROS)};
}

template <int WARPS>
__device__ float sum_of_block(float x, float (&of_warp)[WARPS]) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(~0u, x, distance);
    }
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        x += of_warp[warp];
    }
    return x;
}


// ---- Codes

// Block (t, b) has frame t of row b, thread i its vector i. A code outside of the codebook reads its last entry.
extern "C" __global__ void __launch_bounds__(CODE_VECTORS) embed_codes(EmbedCodes arguments) {
    const u64 frame = (u64)blockIdx.y * arguments.frames + blockIdx.x;
    const i64 *codes = arguments.codes + blockIdx.y * arguments.codebooks * arguments.frames + blockIdx.x;
    uint4 sum = {};
    for (u32 book = 0; book < arguments.codebooks; ++book) {
        const u64 code = min((u64)codes[book * arguments.frames], (u64)(CODEBOOK - 1));
        const uint4 entry = arguments.tables[(book * (u64)CODEBOOK + code) * CODE_VECTORS + threadIdx.x];
        const bool is_first = book == 0 || book == arguments.semantic_codebooks;
        sum = is_first ? entry : add(sum, entry);
        if (book + 1 == arguments.semantic_codebooks) {
            arguments.semantic[frame * CODE_VECTORS + threadIdx.x] = sum;
        }
    }
    arguments.acoustic[frame * CODE_VECTORS + threadIdx.x] = sum;
}


// ---- Transformer

struct AddAndNormShared {
    float squares[HIDDEN_WARPS];
};

// Block i has frame i of all rows, thread t its vector t. RMS norm, rounded before and after its weight.
extern "C" __global__ void __launch_bounds__(HIDDEN_VECTORS) add_and_norm(AddAndNorm arguments) {
    const u64 vector = (u64)blockIdx.x * HIDDEN_VECTORS + threadIdx.x;
    uint4 total = arguments.x[vector];
    if (arguments.scale) {
        total = multiply(total, arguments.scale[threadIdx.x]);
    }
    if (arguments.residual) {
        total = add(total, arguments.residual[vector]);
    }
    if (arguments.sum) {
        arguments.sum[vector] = total;
    }
    const Eight x = unpack(total);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        squares += x.v[i] * x.v[i];
    }
    squares = sum_of_block(squares, shared<AddAndNormShared>().squares);
    const float factor = rsqrtf(squares / HIDDEN + NORM_EPSILON);
    const uint4 normalized = rounded([&](int i) { return x.v[i] * factor; });
    arguments.normalized[vector] = multiply(normalized, arguments.weight[threadIdx.x]);
}

// Thread t of all has vector t of (B, T, INNER). silu(gate) is rounded, and so is its product with up.
extern "C" __global__ void __launch_bounds__(THREADS) silu_and_multiply(SiluAndMultiply arguments) {
    const u64 vector = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (vector >= arguments.vectors) {
        return;
    }
    const u64 gate_vector = vector + vector / INNER_VECTORS * INNER_VECTORS;
    const Eight gate = unpack(arguments.gate_up[gate_vector]);
    const uint4 silu = rounded([&](int i) { return gate.v[i] / (1 + expf(-gate.v[i])); });
    arguments.inner[vector] = multiply(silu, arguments.gate_up[gate_vector + INNER_VECTORS]);
}

// Dimension `i` of a head after RoPE. Both products are rounded, and their sum.
__device__ float rotated(const bf16 *head, const bf16 *cos, const bf16 *sin, int i) {
    const int half = HEAD_DIM / 2;
    const float other = i < half ? -low_half(head[i + half]) : low_half(head[i - half]);
    const float along = round_to_bf16(low_half(head[i]) * low_half(cos[i]));
    return round_to_bf16(along + round_to_bf16(other * low_half(sin[i])));
}

// A key is 16 bytes longer than it needs: the 8 lanes that read 16 bytes at once then hit all banks.
struct AttentionShared {
    bf16 keys[MAX_KEYS][HEAD_DIM + 8];
    bf16 values[MAX_KEYS][HEAD_DIM];
    float query[ATTENTION_WARPS][HEAD_DIM];
    float weights[ATTENTION_WARPS][32 * KEYS_PER_LANE];
};

// Block (h, b) has head h of row b, and is alone in reading and writing its keys and values. First it gathers
// the keys of WINDOW - 1 positions before the chunk and those of the chunk, in the order of positions, then
// each warp has every ATTENTION_WARPS-th query: a lane has every 32nd key, later two dimensions of the output.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) window_attention(WindowAttention arguments) {
    AttentionShared &in_shared = shared<AttentionShared>();
    const int head = blockIdx.x;
    const int row = blockIdx.y;
    const int frames = arguments.frames;
    const i64 slot = arguments.slots[row];
    const i64 position = arguments.positions[slot];
    const int old = min(position, (i64)(WINDOW - 1));                    // positions before the chunk
    const u64 frame_stride = 3 * HEADS * HEAD_DIM;
    const bf16 *queries = arguments.qkv + row * frames * frame_stride + head * HEAD_DIM;
    const bf16 *cos = arguments.cos + (u64)row * frames * HEAD_DIM;
    const bf16 *sin = arguments.sin + (u64)row * frames * HEAD_DIM;
    bf16 *keys = arguments.keys + (slot * HEADS + head) * RING * HEAD_DIM;
    bf16 *values = arguments.values + (slot * HEADS + head) * RING * HEAD_DIM;

    for (int i = threadIdx.x; i < old * HEAD_DIM / 8; i += ATTENTION_THREADS) {
        const int key = i / (HEAD_DIM / 8);
        const int vector = i % (HEAD_DIM / 8);
        const u64 place = (position - old + key) % RING * (HEAD_DIM / 8) + vector;
        ((uint4 *)in_shared.keys[key])[vector] = ((const uint4 *)keys)[place];
        ((uint4 *)in_shared.values[key])[vector] = ((const uint4 *)values)[place];
    }
    __syncthreads();                                  // a new key may take the place of an old one
    for (int i = threadIdx.x; i < frames * HEAD_DIM; i += ATTENTION_THREADS) {
        const int frame = i / HEAD_DIM;
        const int dimension = i % HEAD_DIM;
        const bf16 *new_key = queries + frame * frame_stride + HEADS * HEAD_DIM;
        const bf16 *new_value = new_key + HEADS * HEAD_DIM;
        const float key = rotated(new_key, cos + frame * HEAD_DIM, sin + frame * HEAD_DIM, dimension);
        const u64 place = (position + frame) % RING * HEAD_DIM + dimension;
        in_shared.keys[old + frame][dimension] = keys[place] = pack_bf16x2(key, 0);
        in_shared.values[old + frame][dimension] = values[place] = new_value[dimension];
    }
    __syncthreads();

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float(&query)[HEAD_DIM] = in_shared.query[warp];
    float(&weights)[32 * KEYS_PER_LANE] = in_shared.weights[warp];
    for (int frame = warp; frame < frames; frame += ATTENTION_WARPS) {
#pragma unroll
        for (int i = lane; i < HEAD_DIM; i += 32) {
            query[i] = rotated(queries + frame * frame_stride, cos + frame * HEAD_DIM, sin + frame * HEAD_DIM, i);
        }
        __syncwarp();
        const int end = old + frame + 1;
        const int first = max(end - WINDOW, 0);
        float score[KEYS_PER_LANE];
        float best = LOWEST_SCORE;
#pragma unroll
        for (int k = 0; k < KEYS_PER_LANE; ++k) {
            const int key = first + k * 32 + lane;
            score[k] = LOWEST_SCORE;
            if (key < end) {
                float sum = 0;
#pragma unroll
                for (int vector = 0; vector < HEAD_DIM / 8; ++vector) {
                    const Eight eight = unpack(((const uint4 *)in_shared.keys[key])[vector]);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        sum += query[8 * vector + i] * eight.v[i];
                    }
                }
                score[k] = sum * rsqrtf(HEAD_DIM);
            }
            best = max(best, score[k]);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            best = max(best, __shfl_xor_sync(~0u, best, distance));
        }
        float total = 0;
#pragma unroll
        for (int k = 0; k < KEYS_PER_LANE; ++k) {
            const float weight = expf(score[k] - best);              // 0 behind the end
            weights[k * 32 + lane] = weight;
            total += weight;
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            total += __shfl_xor_sync(~0u, total, distance);
        }
        __syncwarp();
        float low = 0;
        float high = 0;
        for (int key = first; key < end; ++key) {
            const u32 pair = ((const u32 *)in_shared.values[key])[lane];
            low += weights[key - first] * low_half(pair);
            high += weights[key - first] * high_half(pair);
        }
        u32 *output = (u32 *)(arguments.output + ((u64)row * frames + frame) * HEADS * HEAD_DIM + head * HEAD_DIM);
        output[lane] = pack_bf16x2(low / total, high / total);
        __syncwarp();                                 // the next query takes the same memory
    }
}


// ---- Activation

// x + inverse_beta * sin(alpha * x)^2
__device__ uint4 snake(uint4 x, uint4 alpha, uint4 inverse_beta) {
    const Eight angle = unpack(multiply(x, alpha));
    const uint4 sine = rounded([&](int i) { return sinf(angle.v[i]); });
    return add(x, multiply(inverse_beta, multiply(sine, sine)));
}

// Where column `column` of row `row` is, of `columns` interleaved in `sequences`.
__device__ u64 interleaved(u32 row, u32 column, u32 columns, u32 sequences) {
    if (sequences == 1) {
        return (u64)row * columns + column;
    }
    const u32 length = (columns + sequences - 1) / sequences;
    return (u64)row * sequences * length + column % sequences * length + column / sequences;
}

// SnakeBeta of the sum (x + bias) * scale + residual, a vector of one column.
__device__ uint4 activated(const Activate &arguments, u32 row, u32 column, u32 channel, bool store_sum) {
    const u32 columns = arguments.columns;
    const u32 vectors = arguments.vectors;
    const u64 vector = ((u64)row * columns + column) * vectors + channel;
    uint4 x = arguments.x[interleaved(row, column, columns, arguments.x_sequences) * vectors + channel];
    if (arguments.bias) {
        x = add(x, arguments.bias[channel]);
    }
    if (arguments.scale) {
        x = multiply(x, arguments.scale[channel]);
    }
    if (arguments.residual) {
        x = add(x, arguments.residual[vector]);
    }
    if (store_sum && arguments.sum) {
        arguments.sum[vector] = x;
    }
    if (arguments.alpha) {
        x = snake(x, arguments.alpha[channel], arguments.inverse_beta[channel]);
    }
    return x;
}

// Block (i, b) has a part of row b. The first blocks, THREADS / P channel vectors each, have the columns of the
// state, a thread for each vector; the others have the new columns, THREADS vectors each.
extern "C" __global__ void __launch_bounds__(THREADS) activate(Activate arguments) {
    const u32 row = blockIdx.y;
    const u32 vectors = arguments.vectors;
    const u32 columns = arguments.columns;
    const u32 state_columns = arguments.state_columns;
    const u32 sequences = arguments.output_sequences;
    const u32 missing = (sequences - (state_columns + columns) % sequences) % sequences;
    const u32 channels_of_block = state_columns ? THREADS / state_columns : 1;
    const u32 state_blocks = state_columns ? (vectors + channels_of_block - 1) / channels_of_block : 0;
    const auto output = [&](u32 column, u32 channel) -> uint4 & {
        const u64 place = interleaved(row, column, state_columns + columns, sequences);
        return arguments.output[place * vectors + channel];
    };

    if (blockIdx.x >= state_blocks) {
        const u32 vector = (blockIdx.x - state_blocks) * THREADS + threadIdx.x;
        const u32 column = vector / vectors;
        const u32 channel = vector % vectors;
        if (column < columns) {
            output(state_columns + column, channel) = activated(arguments, row, column, channel, true);
        } else if (column < columns + missing) {
            output(state_columns + column, channel) = uint4{0, 0, 0, 0};
        }
        return;
    }

    // All of the old state is read before any of it is overwritten: the block has all columns of its channels.
    const u32 column = threadIdx.x / channels_of_block;
    const u32 channel = blockIdx.x * channels_of_block + threadIdx.x % channels_of_block;
    const bool in_use = column < state_columns && channel < vectors;
    uint4 *state = arguments.state + (u64)arguments.slots[row] * state_columns * vectors;
    uint4 before;
    uint4 next;
    if (in_use) {
        const u32 next_column = columns + column;     // of state and new columns, joined
        before = state[column * vectors + channel];
        next = next_column < state_columns
                   ? state[next_column * vectors + channel]
                   : activated(arguments, row, next_column - state_columns, channel, false);
    }
    __syncthreads();
    if (in_use) {
        output(column, channel) = before;
        state[column * vectors + channel] = next;
    }
}


// ---- ConvNeXt: the depthwise convolution and the norm

struct NormShared {
    float sums[LATENT_WARPS];
    float squares[LATENT_WARPS];
};

// Block (t, b) has column t of row b, thread i its vector i. The convolution is rounded once, and so is the norm.
extern "C" __global__ void __launch_bounds__(LATENT_VECTORS) depthwise_norm(DepthwiseNorm arguments) {
    NormShared &in_shared = shared<NormShared>();
    const u32 columns = arguments.columns;
    const u32 channel = threadIdx.x;
    const u64 first = ((u64)blockIdx.y * (TAPS - 1 + columns) + blockIdx.x) * LATENT_VECTORS + channel;
    Eight sum = unpack(arguments.bias[channel]);
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        const Eight x = unpack(arguments.x[first + tap * LATENT_VECTORS]);
        const Eight weight = unpack(arguments.weight[tap * LATENT_VECTORS + channel]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum.v[i] += x.v[i] * weight.v[i];
        }
    }
    const Eight x = unpack(pack(sum));

    float total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        total += x.v[i];
    }
    const float mean = sum_of_block(total, in_shared.sums) / LATENT;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        squares += (x.v[i] - mean) * (x.v[i] - mean);
    }
    const float factor = rsqrtf(sum_of_block(squares, in_shared.squares) / LATENT + EPSILON);
    const Eight weight = unpack(arguments.norm_weight[channel]);
    const Eight bias = unpack(arguments.norm_bias[channel]);
    arguments.output[((u64)blockIdx.y * columns + blockIdx.x) * LATENT_VECTORS + channel] =
        rounded([&](int i) { return (x.v[i] - mean) * factor * weight.v[i] + bias.v[i]; });
}


// ---- The last convolution, to one channel

// A column is one vector longer than it needs: the 8 threads that read 16 bytes at once then hit all banks.
struct SamplesShared {
    uint4 x[SAMPLES_OF_BLOCK + TAPS - 1][LAST_VECTORS + 1];
    uint4 weight[TAPS][LAST_VECTORS];
};

// Block (i, b) has samples i * SAMPLES_OF_BLOCK and following of row b. Two neighbouring threads have a sample:
// one sums over the even vectors, the other over the odd ones. Rounded before and after the bias is added.
extern "C" __global__ void __launch_bounds__(THREADS) to_samples(ToSamples arguments) {
    SamplesShared &in_shared = shared<SamplesShared>();
    const u32 columns = arguments.columns;
    const u32 first = blockIdx.x * SAMPLES_OF_BLOCK;
    const u32 loaded_columns = min(columns - first, (u32)SAMPLES_OF_BLOCK) + TAPS - 1;
    const uint4 *x = arguments.x + ((u64)blockIdx.y * (TAPS - 1 + columns) + first) * LAST_VECTORS;
    for (u32 i = threadIdx.x; i < loaded_columns * LAST_VECTORS; i += THREADS) {
        in_shared.x[i / LAST_VECTORS][i % LAST_VECTORS] = x[i];
    }
    for (u32 i = threadIdx.x; i < TAPS * LAST_VECTORS; i += THREADS) {
        in_shared.weight[i / LAST_VECTORS][i % LAST_VECTORS] = arguments.weight[i];
    }
    __syncthreads();

    const u32 sample = threadIdx.x / 2;
    float sum = 0;
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        for (u32 channel = threadIdx.x % 2; channel < LAST_VECTORS; channel += 2) {
            const Eight values = unpack(in_shared.x[sample + tap][channel]);
            const Eight weight = unpack(in_shared.weight[tap][channel]);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum += values.v[i] * weight.v[i];
            }
        }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (threadIdx.x % 2 == 0 && first + sample < columns) {
        const float with_bias = round_to_bf16(sum) + low_half(arguments.bias[0]);
        arguments.output[(u64)blockIdx.y * columns + first + sample] = pack_bf16x2(with_bias, 0);
    }
}
