// Barriers in shared memory at which threads or copies arrive (mbarriers), for megakernel.cu and overlapped_stack.cu,
// which define BULK_COPIES: 1 for the instructions of compute capability 9.0.

#ifndef ON_CPU

__device__ u32 shared_address(const void *pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
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

// Arrives, and makes the phase wait for this many copied bytes as well.
__device__ void mbarrier_arrive_expect_tx(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
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
