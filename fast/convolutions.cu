// What lies between the matrix products and convolutions of the codec's decoder, channels-last: a column of C
// channels is contiguous.
//
// convolutions.py compiles this file with NVRTC for one GPU and one model. It puts these definitions before it:
//
//     LATENT, EPSILON    channels of the ConvNeXt blocks, and the epsilon of their norm
//     LAST               channels of the last convolution's input
//     THREADS            of a block of activate and to_samples
//
// convolutions_reference.py has the kernels in a few lines of torch. Values are rounded to bfloat16 where the
// model's own modules round them: after every product and every sum.
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

constexpr int TAPS = 7;                               // of the convolutions in depthwise_norm and to_samples
constexpr int LATENT_VECTORS = LATENT / 8;
constexpr int LATENT_WARPS = LATENT_VECTORS / 32;
constexpr int LAST_VECTORS = LAST / 8;
constexpr int SAMPLES_OF_BLOCK = THREADS / 2;

static_assert(LATENT % 256 == 0, "unsupported sizes: LATENT must be a multiple of 256");    // whole warps
static_assert(LATENT <= 8192, "unsupported sizes: LATENT must be at most 8192");            // threads
static_assert(LAST % 8 == 0, "unsupported sizes: LAST must be a multiple of 8");


// ---- Arguments, a struct for each kernel. convolutions.py writes them and checks their layout when it compiles.

#ifdef __CUDACC_RTC__  // NVRTC of CUDA 12 does not know __builtin_offsetof
#define OFFSET_OF(type, field) __INTADDR__(&((type *)0)->field)
#else
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif

// Pointers marked "or null" are for steps that are left out.
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

#ifdef CONVOLUTIONS_ON_CPU
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

template <class Function>
__device__ Eight for_each(Function function) {
    Eight result;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        result.v[i] = round_to_bf16(function(i));
    }
    return result;
}

__device__ Eight add(Eight x, Eight y) {
    return for_each([&](int i) { return x.v[i] + y.v[i]; });
}

__device__ Eight multiply(Eight x, Eight y) {
    return for_each([&](int i) { return x.v[i] * y.v[i]; });
}


// ---- Activation

// x + inverse_beta * sin(alpha * x)^2
__device__ Eight snake(Eight x, Eight alpha, Eight inverse_beta) {
    const Eight angle = multiply(x, alpha);
    const Eight sine = for_each([&](int i) { return sinf(angle.v[i]); });
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
    const uint4 loaded =
        arguments.x[interleaved(row, column, columns, arguments.x_sequences) * vectors + channel];
    const uint4 residual = arguments.residual ? arguments.residual[vector] : loaded;
    Eight x = unpack(loaded);
    if (arguments.bias) {
        x = add(x, unpack(arguments.bias[channel]));
    }
    if (arguments.scale) {
        x = multiply(x, unpack(arguments.scale[channel]));
    }
    if (arguments.residual) {
        x = add(x, unpack(residual));
    }
    if (store_sum && arguments.sum) {
        arguments.sum[vector] = pack(x);
    }
    if (arguments.alpha) {
        x = snake(x, unpack(arguments.alpha[channel]), unpack(arguments.inverse_beta[channel]));
    }
    return pack(x);
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

__device__ float sum_of_block(float x, float (&of_warp)[LATENT_WARPS]) {
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
    for (int warp = 0; warp < LATENT_WARPS; ++warp) {
        x += of_warp[warp];
    }
    return x;
}

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
    const Eight x = for_each([&](int i) { return sum.v[i]; });

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
    const Eight normalized = for_each([&](int i) { return (x.v[i] - mean) * factor * weight.v[i] + bias.v[i]; });
    arguments.output[((u64)blockIdx.y * columns + blockIdx.x) * LATENT_VECTORS + channel] = pack(normalized);
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
