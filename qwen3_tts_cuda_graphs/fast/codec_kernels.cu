// The kernels between the matrix products and convolutions of the codec's decoder. Tensors are channels-last: a
// column of C channels is contiguous.
//
// codec_kernels.py compiles this file with NVRTC for one GPU and one model. It puts these definitions before
// it:
//
//     CODEBOOK, CODE_DIM           entries of a codebook, and their size
//     HIDDEN, INNER, EPSILON       of the transformer, and of its norms
//     HEADS, WINDOW, RING          of its attention: positions that a query sees, and that are stored
//     MAX_FRAMES                   most frames of a chunk
//     LATENT, LATENT_EPSILON       channels of the ConvNeXt blocks, and the epsilon of their norm
//     LAST                         channels of the last convolution's input
//     THREADS                      per block of activate, to_samples and silu_and_multiply
//
// codec_kernels_reference.py has the kernels in a few lines of torch; add_and_norm and silu_and_multiply are in
// layer_kernels.h. Values are rounded to bfloat16 where the model's own modules round them: after every product
// and every sum outside of matrix products.
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
//     activate        product, bias and residual of      their sum, the residual of this unit; its SnakeBeta
//                     the previous unit, state           after the columns of `state`; the new state
//     (GEMMs)         7 columns, with dilation           product
//     activate        product, bias                      SnakeBeta of their sum
//     (GEMM)                                             product, for the next `activate`
//
// A causal convolution reads P columns before the first new one: `state` keeps them for each row. `activate` writes
// them in front of the new columns, and keeps the last P columns for the next chunk.
//
// A convolution with dilation D reads every D-th column. `activate` writes its input as D interleaved
// sequences, sequence r with the columns r, r + D, r + 2 D, ..., so that a convolution without dilation computes
// the same. All sequences have the length of the first; in those with fewer columns the last one is never written
// and is ignored. The output is interleaved in the same way until the next `activate` restores the order.
//
// In the comments, a vector is 8 consecutive channels: 16 bytes, what a thread loads at once (uint4).

#include "kernels.h"
#include "layer_kernels.h"


// ---- Sizes

constexpr int HEAD_DIM = 64;
constexpr int CODE_VECTORS = CODE_DIM / 8;
constexpr int ATTENTION_WARPS = 4;
constexpr int ATTENTION_THREADS = 32 * ATTENTION_WARPS;
constexpr int KEYS_PER_LANE = (WINDOW + 31) / 32;
constexpr int MAX_KEYS = WINDOW - 1 + MAX_FRAMES;
constexpr int TAPS = 7;                               // of the convolutions in depthwise_norm and to_samples
constexpr int LATENT_VECTORS = LATENT / 8;
constexpr int LATENT_WARPS = LATENT_VECTORS / 32;
constexpr int LAST_VECTORS = LAST / 8;
constexpr int BLOCK_SAMPLES = THREADS / 2;

static_assert(CODE_DIM % 8 == 0, "unsupported sizes: CODE_DIM must be a multiple of 8");
static_assert(RING >= WINDOW - 1 && RING >= MAX_FRAMES, "unsupported sizes: RING is too short");
static_assert(LATENT % 256 == 0, "unsupported sizes: LATENT must be a multiple of 256");    // whole warps
static_assert(LATENT <= 8192, "unsupported sizes: LATENT must be at most 8192");            // threads
static_assert(LAST % 8 == 0, "unsupported sizes: LAST must be a multiple of 8");


// ---- Arguments, one struct for each kernel. codec_kernels.py writes them and checks their layout when it compiles.

// A step whose pointer is null is skipped.
struct EmbedCodes {
    const i64 *codes;                                 // (B, Q, T)
    const uint4 *tables;                              // (Q, CODEBOOK, CODE_DIM)
    uint4 *semantic;                                  // (B, T, CODE_DIM), sum over the first codebooks
    uint4 *acoustic;                                  // (B, T, CODE_DIM), sum over the others
    u64 codebooks;                                    // Q
    u64 semantic_codebooks;
    u64 frames;                                       // T
};

struct WindowAttention {
    const bf16 *qkv;                                  // (B, T, 3, HEADS, HEAD_DIM)
    const bf16 *cos;                                  // (B, T, HEAD_DIM)
    const bf16 *sin;                                  // (B, T, HEAD_DIM)
    const i64 *positions;                             // (rows), position of the first new frame
    const i64 *row_indices;                           // (B)
    bf16 *keys;                                       // (rows, HEADS, RING, HEAD_DIM), position p at p % RING
    bf16 *values;                                     // (rows, HEADS, RING, HEAD_DIM)
    bf16 *output;                                     // (B, T, HEADS, HEAD_DIM)
    u64 frames;                                       // T
};

struct Activate {
    const uint4 *x;                                   // (B, L, C), interleaved
    const uint4 *bias;                                // (C), or null
    const uint4 *scale;                               // (C), or null
    const uint4 *residual;                            // (B, L, C), or null
    const uint4 *alpha;                               // (C), or null
    const uint4 *inverse_beta;                        // (C), or null
    uint4 *sum;                                       // (B, L, C), or null
    uint4 *state;                                     // (rows, P, C), or null
    const i64 *row_indices;                           // (B), or null
    uint4 *output;                                    // (B, P + L, C), interleaved
    u64 columns;                                      // L
    u64 state_columns;                                // P
    u64 vectors;                                      // C / 8
    u64 x_sequences;                                  // interleaved sequences of x, 1: none
    u64 x_length;                                     // columns of each sequence
    u64 output_sequences;                             // interleaved sequences of the output
    u64 output_length;
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


// ---- Vectors

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


// ---- Codes

// Block (t, b) computes frame t of chunk b, thread i its vector i. A code outside of the codebook reads the last
// entry.
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


// ---- Attention

// Dimension `i` of a head after RoPE. Both products are rounded, and their sum.
__device__ float rotated(const bf16 *head, const bf16 *cos, const bf16 *sin, int i) {
    const int half = HEAD_DIM / 2;
    const float other = i < half ? -low_half(head[i + half]) : low_half(head[i - half]);
    const float along = round_to_bf16(low_half(head[i]) * low_half(cos[i]));
    return round_to_bf16(along + round_to_bf16(other * low_half(sin[i])));
}

// Keys are padded by 16 bytes: 8 lanes that load 16 bytes each then use all banks.
struct AttentionShared {
    bf16 keys[MAX_KEYS][HEAD_DIM + 8];
    bf16 values[MAX_KEYS][HEAD_DIM];
    float query[ATTENTION_WARPS][HEAD_DIM];
    float weights[ATTENTION_WARPS][32 * KEYS_PER_LANE];
};

// Block (h, b) computes head h of chunk b; no other block reads or writes its keys and values. First it gathers the
// keys of WINDOW - 1 positions before the chunk and those of the chunk, in the order of positions. Then each warp
// takes every ATTENTION_WARPS-th query: a lane computes the scores of every 32nd key, and two dimensions of the
// output.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) window_attention(WindowAttention arguments) {
    AttentionShared &in_shared = static_shared<AttentionShared>();
    const int head = blockIdx.x;
    const int chunk = blockIdx.y;
    const int frames = arguments.frames;
    const i64 row = arguments.row_indices[chunk];
    const i64 position = arguments.positions[row];
    const int old = min(position, (i64)(WINDOW - 1));                    // positions before the chunk
    const u64 frame_stride = 3 * HEADS * HEAD_DIM;
    const bf16 *queries = arguments.qkv + chunk * frames * frame_stride + head * HEAD_DIM;
    const bf16 *cos = arguments.cos + (u64)chunk * frames * HEAD_DIM;
    const bf16 *sin = arguments.sin + (u64)chunk * frames * HEAD_DIM;
    bf16 *keys = arguments.keys + (row * HEADS + head) * RING * HEAD_DIM;
    bf16 *values = arguments.values + (row * HEADS + head) * RING * HEAD_DIM;

    for (int i = threadIdx.x; i < old * HEAD_DIM / 8; i += ATTENTION_THREADS) {
        const int key = i / (HEAD_DIM / 8);
        const int vector = i % (HEAD_DIM / 8);
        const u64 place = (position - old + key) % RING * (HEAD_DIM / 8) + vector;
        ((uint4 *)in_shared.keys[key])[vector] = ((const uint4 *)keys)[place];
        ((uint4 *)in_shared.values[key])[vector] = ((const uint4 *)values)[place];
    }
    __syncthreads();                                  // a new key may overwrite an old one
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

    const int warp = warp_index();
    const int lane = lane_index();
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
        best = warp_max(best);
        float total = 0;
#pragma unroll
        for (int k = 0; k < KEYS_PER_LANE; ++k) {
            const float weight = expf(score[k] - best);              // 0 past the end
            weights[k * 32 + lane] = weight;
            total += weight;
        }
        total = warp_sum(total);
        __syncwarp();
        float low = 0;
        float high = 0;
        for (int key = first; key < end; ++key) {
            const u32 pair = ((const u32 *)in_shared.values[key])[lane];
            low += weights[key - first] * low_half(pair);
            high += weights[key - first] * high_half(pair);
        }
        u32 *output = (u32 *)(arguments.output + ((u64)chunk * frames + frame) * HEADS * HEAD_DIM + head * HEAD_DIM);
        output[lane] = pack_bf16x2(low / total, high / total);
        __syncwarp();                                 // the next query overwrites the memory
    }
}


// ---- Activation

// The sine of a bfloat16 up to MAX_SHORT_ANGLE, or its negative: only the square is used. It takes a third of sinf's
// instructions and is less exact, but equal after rounding to bfloat16 for every angle.
constexpr float MAX_SHORT_ANGLE = 65536;

__device__ float short_sine(float angle) {
    constexpr float ROUND = 3 << 22;                  // floats of this size have no fraction
    const float turns = fmaf(angle, 0.318309886f, ROUND) - ROUND;        // multiples of pi
    const float high = fmaf(turns, -3.14159274f, angle);
    const float rest = fmaf(turns, 8.74227766e-8f, high);                // of the angle, at most pi / 2
    const float square = rest * rest;
    const float series = fmaf(fmaf(-0.000185405667f, square, 0.00831422529f), square, -0.1666585f);
    return fmaf(rest * square, series, rest);
}

// x + inverse_beta * sin(alpha * x)^2
__device__ uint4 snake(uint4 x, uint4 alpha, uint4 inverse_beta) {
    const Eight angle = unpack(multiply(x, alpha));
    float largest = 0;
#pragma unroll
    for (float value : angle.v) {
        largest = fmaxf(largest, fabsf(value));
    }
    const uint4 sine = largest <= MAX_SHORT_ANGLE ? rounded([&](int i) { return short_sine(angle.v[i]); })
                                                  : rounded([&](int i) { return sinf(angle.v[i]); });
    return add(x, multiply(inverse_beta, multiply(sine, sine)));
}

// The index of a column of a chunk that is interleaved in `sequences` of `length` columns.
__device__ u64 interleaved(u32 chunk, u32 column, u32 sequences, u32 length) {
    if (sequences == 1) {
        return (u64)chunk * length + column;
    }
    return ((u64)chunk * sequences + column % sequences) * length + column / sequences;
}

// SnakeBeta of the sum (x + bias) * scale + residual, for one vector of a column.
__device__ uint4 activated(const Activate &arguments, u32 chunk, u32 column, u32 channel, bool store_sum) {
    const u32 vectors = arguments.vectors;
    const u64 vector = ((u64)chunk * arguments.columns + column) * vectors + channel;
    const u64 place = interleaved(chunk, column, arguments.x_sequences, arguments.x_length);
    uint4 x = arguments.x[place * vectors + channel];
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

// Block (i, b) computes a part of chunk b, one vector per thread. The first blocks take the columns of the state,
// THREADS / P channel vectors each; the others take the new columns, THREADS vectors each.
extern "C" __global__ void __launch_bounds__(THREADS) activate(Activate arguments) {
    const u32 chunk = blockIdx.y;
    const u32 vectors = arguments.vectors;
    const u32 columns = arguments.columns;
    const u32 state_columns = arguments.state_columns;
    const u32 channels_of_block = state_columns ? THREADS / state_columns : 1;
    const u32 state_blocks = state_columns ? (vectors + channels_of_block - 1) / channels_of_block : 0;
    const auto output = [&](u32 column, u32 channel) -> uint4 & {
        const u64 place = interleaved(chunk, column, arguments.output_sequences, arguments.output_length);
        return arguments.output[place * vectors + channel];
    };

    if (blockIdx.x >= state_blocks) {
        const u32 vector = (blockIdx.x - state_blocks) * THREADS + threadIdx.x;
        const u32 column = vector / vectors;
        const u32 channel = vector % vectors;
        if (column < columns) {
            output(state_columns + column, channel) = activated(arguments, chunk, column, channel, true);
        }
        return;
    }

    // The whole old state is read before any of it is overwritten: the block has all columns of its channels.
    const u32 column = threadIdx.x / channels_of_block;
    const u32 channel = blockIdx.x * channels_of_block + threadIdx.x % channels_of_block;
    const bool in_use = column < state_columns && channel < vectors;
    uint4 *state = arguments.state + (u64)arguments.row_indices[chunk] * state_columns * vectors;
    uint4 before;
    uint4 next;
    if (in_use) {
        const u32 next_column = columns + column;     // in state and new columns, joined
        before = state[column * vectors + channel];
        next = next_column < state_columns
                   ? state[next_column * vectors + channel]
                   : activated(arguments, chunk, next_column - state_columns, channel, false);
    }
    __syncthreads();
    if (in_use) {
        output(column, channel) = before;
        state[column * vectors + channel] = next;
    }
}


// ---- ConvNeXt: the depthwise convolution and the norm

struct LatentShared {
    float sums[LATENT_WARPS];
    float squares[LATENT_WARPS];
};

// Block (t, b) computes column t of chunk b, thread i its vector i. The convolution is rounded once, and so is the
// norm.
extern "C" __global__ void __launch_bounds__(LATENT_VECTORS) depthwise_norm(DepthwiseNorm arguments) {
    LatentShared &in_shared = static_shared<LatentShared>();
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
    const float mean = block_sum(total, in_shared.sums) / LATENT;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        squares += (x.v[i] - mean) * (x.v[i] - mean);
    }
    const float factor = rsqrtf(block_sum(squares, in_shared.squares) / LATENT + LATENT_EPSILON);
    const Eight weight = unpack(arguments.norm_weight[channel]);
    const Eight bias = unpack(arguments.norm_bias[channel]);
    arguments.output[((u64)blockIdx.y * columns + blockIdx.x) * LATENT_VECTORS + channel] =
        rounded([&](int i) { return (x.v[i] - mean) * factor * weight.v[i] + bias.v[i]; });
}


// ---- The last convolution, to one channel

// Columns are padded by one vector: 8 threads that load 16 bytes each then use all banks.
struct SamplesShared {
    uint4 x[BLOCK_SAMPLES + TAPS - 1][LAST_VECTORS + 1];
    uint4 weight[TAPS][LAST_VECTORS];
};

// Block (i, b) computes BLOCK_SAMPLES samples of chunk b, from i * BLOCK_SAMPLES on. Two neighbouring threads compute
// a sample: one sums over the even vectors, the other over the odd ones. The sum is rounded before and after the
// bias is added.
extern "C" __global__ void __launch_bounds__(THREADS) to_samples(ToSamples arguments) {
    SamplesShared &in_shared = static_shared<SamplesShared>();
    const u32 columns = arguments.columns;
    const u32 first = blockIdx.x * BLOCK_SAMPLES;
    const u32 loaded_columns = min(columns - first, (u32)BLOCK_SAMPLES) + TAPS - 1;
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
