// Small device functions that megakernel.cu, batched.cu and codec_kernels.cu share. kernels.py puts this file
// in the place of their #include lines, because NVRTC compiles a single text.
//
// A u32 holds a pair of bfloat16, the first one in its lower half. A vector is what a thread loads at once,
// four bfloat16 (uint2) or eight (uint4). Quad and Eight are the same as floats.

using bf16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

// Attention's score of a masked key. Finite, because the difference of two infinite scores is NaN.
constexpr float LOWEST_SCORE = -1e30f;

// For the checks of struct layouts that kernels.py appends. NVRTC of CUDA 12 does not know __builtin_offsetof.
#ifdef __CUDACC_RTC__
#define OFFSET_OF(type, field) __INTADDR__(&((type *)0)->field)
#else
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif


// ---- PTX instructions and shared memory
// For a run on a CPU, tests/gpu_on_cpu.h, included before this file, defines ON_CPU and functions of the same
// names.

#ifndef ON_CPU

// The shared memory of a block as a T, the only object that its kernel keeps there: declared by the kernel, or of
// the size that the launch asks for.
template <class T>
__device__ T &static_shared() {
    __shared__ T memory;
    return memory;
}

template <class T>
__device__ T &dynamic_shared() {
    extern __shared__ T dynamic_memory[];
    return dynamic_memory[0];
}

// Two floats, rounded to nearest even.
__device__ u32 pack_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// x * y + z of two pairs, rounded once.
__device__ u32 fma_bf16x2(u32 x, u32 y, u32 z) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
    return result;
}

// D[16][8] += A[16][16] * B[16][8]. Lane 4 r + q holds rows r and r + 8 of A at k = 2 q, 2 q + 1, 2 q + 8, 2 q + 9;
// column r of B at the same k; rows r and r + 8 of D in columns 2 q and 2 q + 1.
__device__ void mma_m16n8k16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#endif


// ---- Threads

__device__ u32 warp_index() {
    return threadIdx.x / 32;
}

__device__ u32 lane_index() {
    return threadIdx.x % 32;
}


// ---- bfloat16 and vectors of them

__device__ float low_half(u32 pair) {
    return __uint_as_float(pair << 16);
}

__device__ float high_half(u32 pair) {
    return __uint_as_float(pair & 0xffff0000);
}

__device__ float round_to_bf16(float x) {
    return low_half(pack_bf16x2(x, 0));
}

template <int N>
struct alignas(16) Floats {
    float v[N];
};
using Quad = Floats<4>;
using Eight = Floats<8>;

__device__ Quad unpack(uint2 x) {
    return {low_half(x.x), high_half(x.x), low_half(x.y), high_half(x.y)};
}

__device__ Eight unpack(uint4 x) {
    return {low_half(x.x), high_half(x.x), low_half(x.y), high_half(x.y),
            low_half(x.z), high_half(x.z), low_half(x.w), high_half(x.w)};
}

__device__ uint2 pack(Quad x) {
    return {pack_bf16x2(x.v[0], x.v[1]), pack_bf16x2(x.v[2], x.v[3])};
}

__device__ uint4 pack(Eight x) {
    return {pack_bf16x2(x.v[0], x.v[1]), pack_bf16x2(x.v[2], x.v[3]),
            pack_bf16x2(x.v[4], x.v[5]), pack_bf16x2(x.v[6], x.v[7])};
}

// Applies a function of two pairs to all pairs of two vectors.
template <class Function>
__device__ uint2 for_each_pair(uint2 x, uint2 y, Function function) {
    return {function(x.x, y.x), function(x.y, y.y)};
}

template <class Function>
__device__ uint4 for_each_pair(uint4 x, uint4 y, Function function) {
    return {function(x.x, y.x), function(x.y, y.y), function(x.z, y.z), function(x.w, y.w)};
}

// Products and sums, rounded as if computed in float: a float holds the product of two bfloat16 exactly, and
// their sum unless one of them is too small to matter. Below compute capability 9.0 there is only the fused
// operation.
template <class Vector>
__device__ Vector multiply(Vector x, Vector y) {
    constexpr u32 NEGATIVE_ZEROS = 0x80008000;        // adding -0 keeps the sign of a product that is 0
    return for_each_pair(x, y, [](u32 a, u32 b) { return fma_bf16x2(a, b, NEGATIVE_ZEROS); });
}

template <class Vector>
__device__ Vector add(Vector x, Vector y) {
    constexpr u32 ONES = 0x3f803f80;
    return for_each_pair(x, y, [](u32 a, u32 b) { return fma_bf16x2(a, ONES, b); });
}

template <int N>
__device__ float dot(Floats<N> x, Floats<N> y) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sum += x.v[i] * y.v[i];
    }
    return sum;
}

__device__ float silu(float x) {
    return x / (1 + expf(-x));
}


// ---- Reductions

// Sum and maximum over each aligned group of LANES lanes; every lane gets the result.
template <int LANES = 32, class T>
__device__ T warp_sum(T x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(~0u, x, distance);
    }
    return x;
}

template <int LANES = 32>
__device__ float warp_max(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    }
    return x;
}

// The vector of another lane of the warp.
__device__ uint4 from_lane(uint4 x, int lane) {
    return for_each_pair(x, x, [&](u32 pair, u32) { return __shfl_sync(~0u, pair, lane); });
}

// Combines a value over the warps of a block. The lane of each warp for which `writes` is true contributes its
// value. Every thread gets the result. There is only one barrier: of_warp must not be the memory of the previous
// call, which slow threads may still read, unless there was another barrier in between.
template <int WARPS, class T, class Combine, class Barrier>
__device__ T combine_warps(T x, T (&of_warp)[WARPS], bool writes, Combine combine, Barrier barrier) {
    if (writes) {
        of_warp[warp_index()] = x;
    }
    barrier();
    x = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) {
        x = combine(x, of_warp[warp]);
    }
    return x;
}

// Sum over all threads of a block.
template <int WARPS>
__device__ float block_sum(float x, float (&of_warp)[WARPS]) {
    const auto add_floats = [](float a, float b) { return a + b; };
    return combine_warps(warp_sum(x), of_warp, lane_index() == 0, add_floats, [] { __syncthreads(); });
}


// ---- RMS norm, RoPE, attention

// x * factor * weight, rounded after both products.
template <class Vector>
__device__ Vector normalize(Vector x, float factor, Vector weight) {
    auto y = unpack(x);
#pragma unroll
    for (float &value : y.v) {
        value *= factor;
    }
    return multiply(pack(y), weight);
}

// Norm and RoPE of a head that is spread over LANES lanes, one vector each. RoPE pairs dimension d with dimension
// (d + size / 2) % size, which is LANES / 2 lanes away. The first half of sin is negated.
template <int LANES, class Vector>
__device__ Vector norm_and_rope(Vector x, Vector weight, Vector cos, Vector sin, float epsilon) {
    constexpr int HEAD_SIZE = LANES * sizeof(Vector) / sizeof(bf16);
    const float squares = warp_sum<LANES>(dot(unpack(x), unpack(x)));
    const Vector normalized = normalize(x, rsqrtf(squares / HEAD_SIZE + epsilon), weight);
    const Vector partner = for_each_pair(normalized, normalized, [](u32 pair, u32) {
        return __shfl_xor_sync(~0u, pair, LANES / 2);
    });
    return add(multiply(normalized, cos), multiply(partner, sin));
}

// The result of attention over some positions: their highest score, the sum of their weights exp(score - best),
// and one dimension of the sum of their values times these weights.
struct PartialAttention {
    float best;
    float weight;
    float sum;
};

// Merges the results of all parts. part(i) is a PartialAttention.
template <class Part>
__device__ PartialAttention merge_attention(int parts, Part part) {
    float best = LOWEST_SCORE;
    for (int i = 0; i < parts; ++i) {
        best = fmaxf(best, part(i).best);
    }
    float weight = 0;
    float sum = 0;
    for (int i = 0; i < parts; ++i) {
        const PartialAttention partial = part(i);
        const float rescale = expf(partial.best - best);
        weight += partial.weight * rescale;
        sum += partial.sum * rescale;
    }
    return {best, weight, sum};
}
