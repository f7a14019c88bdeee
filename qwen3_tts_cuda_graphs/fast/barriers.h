// What kernels use whose threads wait for other blocks or for copies to shared memory: megakernel.cu, overlapped_stack.cu.
// They define BULK_COPIES, 1 for the instructions of compute capability 9.0.

#ifndef ON_CPU

__device__ u32 shared_address(const void *pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// Relaxed accesses at GPU scope go to L2: they see what other blocks wrote. They do not order other accesses,
// and need not: a word says itself whether it has been written.
__device__ void store_relaxed(void *address, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(address), "r"(value) : "memory");
}

__device__ u32 load_relaxed(const u32 *address) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ uint4 load_relaxed_x4(const u32 *address) {
    uint4 values;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "l"(address)
                 : "memory");
    return values;
}

template <int ARRIVALS>
__device__ void mbarrier_init(u64 *barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;"
                 :: "r"(shared_address(barrier)), "n"(ARRIVALS)
                 : "memory");
}

__device__ void mbarrier_arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

#if BULK_COPIES

// Whether the phase of this parity is complete. May suspend the thread for a while before it answers.
__device__ bool mbarrier_try_wait(u64 *barrier, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}

// Arrives, and makes the phase wait for this many bytes as well.
__device__ void mbarrier_arrive_expect_tx(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Orders this thread's accesses of shared memory before the bulk copies, or products, that follow; a barrier alone does
// not.
__device__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#else

// Whether the phase of this parity is complete. Does not suspend the thread.
__device__ bool mbarrier_try_wait(u64 *barrier, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}

#endif

#endif
