// The kernels of a decoder layer that batched.cu and codec_kernels.cu share. They use the definitions HIDDEN,
// INNER, EPSILON and THREADS; layer_kernels.py launches them.

constexpr int HIDDEN_VECTORS = HIDDEN / 8;
constexpr int INNER_VECTORS = INNER / 8;

static_assert(HIDDEN % 256 == 0, "unsupported sizes: HIDDEN must be a multiple of 256");    // whole warps
static_assert(HIDDEN <= 8192, "unsupported sizes: HIDDEN must be at most 8192");            // threads
static_assert(INNER % 8 == 0, "unsupported sizes: INNER must be a multiple of 8");

struct AddAndNorm {
    const uint4 *x;                                   // (B, HIDDEN), or null
    const Eight *partials;                            // (count, B, HIDDEN), float32, whose sum is x; or null
    u64 count;                                        // partial sums
    u64 partial_vectors;                              // vectors of a partial sum
    const uint4 *scale;                               // (HIDDEN), or null
    const uint4 *residual;                            // (B, HIDDEN), or null
    const uint4 *weight;                              // (HIDDEN)
    uint4 *sum;                                       // (B, HIDDEN), or null; may be `residual`
    uint4 *normalized;                                // (B, HIDDEN)
};

struct SiluAndMultiply {
    const uint4 *gate_up;                             // (B, 2, INNER)
    uint4 *inner;                                     // (B, INNER)
    u64 vectors;                                      // in all of `inner`
};

struct NormShared {
    float squares[HIDDEN_VECTORS / 32];               // of each warp
};

// A matrix product in partial sums (split-K), added and rounded once. `vector` is an index into one partial sum.
__device__ uint4 sum_of_partials(const AddAndNorm &arguments, u64 vector) {
    Eight sum = {};
#pragma unroll 4
    for (u64 partial = 0; partial < arguments.count; ++partial) {
        const Eight value = arguments.partials[partial * arguments.partial_vectors + vector];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum.v[i] += value.v[i];
        }
    }
    return pack(sum);
}

// x * scale + residual, rounded after both operations, and its RMS norm. Block b computes entry b, thread t its
// vector t.
extern "C" __global__ void __launch_bounds__(HIDDEN_VECTORS) add_and_norm(AddAndNorm arguments) {
    const u64 vector = (u64)blockIdx.x * HIDDEN_VECTORS + threadIdx.x;
    const uint4 weight = arguments.weight[threadIdx.x];
    uint4 sum = arguments.x ? arguments.x[vector] : sum_of_partials(arguments, vector);
    if (arguments.scale) {
        sum = multiply(sum, arguments.scale[threadIdx.x]);
    }
    if (arguments.residual) {
        sum = add(sum, arguments.residual[vector]);
    }
    if (arguments.sum) {
        arguments.sum[vector] = sum;
    }
    const float squares = block_sum(dot(unpack(sum), unpack(sum)), static_shared<NormShared>().squares);
    arguments.normalized[vector] = normalize(sum, rsqrtf(squares / HIDDEN + EPSILON), weight);
}

// silu(gate) is rounded, and so is its product with up. One thread per vector of `inner`.
extern "C" __global__ void __launch_bounds__(THREADS) silu_and_multiply(SiluAndMultiply arguments) {
    const u64 vector = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (vector >= arguments.vectors) {
        return;
    }
    const u64 gate_vector = vector + vector / INNER_VECTORS * INNER_VECTORS;
    const uint4 up = arguments.gate_up[gate_vector + INNER_VECTORS];
    Eight gate = unpack(arguments.gate_up[gate_vector]);
#pragma unroll
    for (float &value : gate.v) {
        value = silu(value);
    }
    arguments.inner[vector] = multiply(pack(gate), up);
}
