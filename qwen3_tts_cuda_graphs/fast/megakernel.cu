// One step of 1, 2, 4, 8 or 16 rows: through every decoder layer, the heads and the sampler, in a single
// cooperative launch.
//
// megakernel.py compiles this file with NVRTC for one GPU and one model. It puts these definitions before it:
//
//     GRID             thread blocks, all of them on the GPU at once
//     SHARED_BYTES     dynamic shared memory of a block
//     L2_BYTES         size of the L2 cache
//     BULK_COPIES      1: copy weights with cp.async.bulk, from compute capability 9.0 on; 0: with cp.async
//     EXCHANGE_BYTES   room for one replica of Exchange
//     LAYERS, HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM, EPSILON     of the stack of decoder layers
//     CODES            heads after the layers: 1 for the talker, more for the code predictor
//     ROWS             rows of a frame (not of a matrix), each with its own cache, position, settings and noise
//     TALKER_HIDDEN    width of the talker's hidden state
//
// megakernel_reference.py computes the same step in a few lines of torch. Sums are float; values are rounded
// to bfloat16 where the model's own forward rounds them.
//
//
// One layer
// ---------
// Every block owns 1/GRID of the rows of every matrix (or 8 more, see Share) and stays on its multiprocessor
// for the whole step. What one block computes and others need goes through global memory (struct Exchange,
// small enough to stay in L2):
//
//     phase                   every block reads          every block computes              and writes
//     ---------------------   ------------------------   -------------------------------   --------------
//     1 input norm, q k v     hidden (all)               QKV_SIZE / GRID rows              qkv
//     2 attention             qkv (of one KV head)       1 or 2 heads, 1/SPLITS of the     splits
//                                                        positions
//     3 merge the splits      splits (of its outputs)    256 / SPLITS outputs              attention
//       2 and 3, the talker   qkv (of one head)          a part of a head's dimensions,    attention
//       to few positions                                 all positions
//     4 o_proj, residual      attention (all)            HIDDEN / GRID rows                post_attention
//     5 norm, gate and up     post_attention (all)       INNER / GRID rows                 inner
//     6 down_proj, residual   inner (all)                HIDDEN / GRID rows                hidden
//
// After the last layer come the final norm and a head, as in phase 1: VOCAB / GRID rows per block, written to
// `logits`, which the sampler reads. The first ATTENTION_BLOCKS blocks do phases 2 and 3. The predictor
// attends to at most 16 positions: there SPLITS is 1, phase 2 writes `attention`, and phase 3 is skipped. The talker
// skips it, too, as long as it attends to at most FEW_POSITIONS: that saves an exchange.
//
// A pass runs a token of each row through the layers and reads the weights once for all rows. The predictor's
// first pass has two tokens of each row, the talker's hidden state and the frame's first code, unless that is
// more than 4 tokens in all. Token t belongs to row t % ROWS.
//
// There is no grid-wide barrier between phases. Each value in Exchange carries an epoch tag; readers spin
// until it matches (as in NCCL's LL protocol):
//
//     bit    31        16 15         0
//           +------------+------------+     epoch: layers begun so far, over all launches, modulo 2^16
//           |   epoch    |  bfloat16  |     tag and value are one 4-byte store: a reader sees both or neither
//           +------------+------------+
//
// A value is overwritten one layer later, or more. By then the writing block has received values of a later
// phase from every block, and a block publishes those only after it has read the earlier ones: the old value
// has no reader left.
//
// From 8 rows on, the vectors that all blocks read (hidden, post_attention, attention, inner) would be most of
// what passes through L2. There they are packed, two bfloat16 to 4 bytes, without tags:
//
//     epoch               e    e + 1    e + 2    e + 3        0xffff, a NaN that no rounding to bfloat16 returns,
//     written to buffer   0      1        2        3          means that a value is not there yet. The thread that
//     empties buffer      2      3        0        1          writes a value also empties its place two epochs ahead.
//
// The values that are emptied are two epochs old and have no reader left. A block reads an emptied place only two
// layers later. By then it has received, from every block, values that were written behind a fence after emptying.
//
// Every wait has a time limit. A thread that still waits WAIT_LIMIT_NS after the start of the launch sets
// `failed`; then every wait of every block ends at its next check, and all blocks run to their end with the
// values they have. The host finds `failed_on_host` set and discards the results.
//
//
// Roles of the threads of a block
// -------------------------------
//     threads   0 .. 255   8 consumer warps: wait for a stage of weights, multiply, exchange, attend, sample
//     threads 256 .. 263   8 producers: thread 256 + s copies slice s, an eighth of the block's rows
//     threads 256 .. 287   without bulk copies, 32 producers: together they copy one slice after the other
//
// Weights do not depend on the token. The producers copy them through a ring in shared memory in the order of
// their use, up to STAGES ahead of the consumers, so that HBM stays busy while the consumers wait for other
// blocks. A stage is 1024 columns (2 KiB) of one row of each slice. With S stages, over time:
//
//     producers  |fill 0|fill 1|fill 2| ... |fill S-1|wait for empty[0]|fill 0|wait for empty[1]|fill 1| ...
//     consumers         |load 0|load 1|wait for other blocks ... |multiply|load 2|load 3|wait ... |multiply|
//                          release 0  release 1                       release 2  release 3
//
// Consumers load the first stages of the next matrix into registers before they wait for other blocks: once the
// vector has arrived, it only has to be multiplied.
//
//     full[s]    8 producers arrive, each with the 2048 bytes it expects: the stage may be used
//                (without bulk copies, 32 producers arrive, each when its copies are complete)
//     empty[s]   8 consumer warps arrive: the stage may be filled again
//
//
// Lane map of the tensor-core instruction (mma.m16n8k16: D[16][8] += A[16][16] * B[16][8])
// ----------------------------------------------------------------------------------------
// Lane l has groupID r = l / 4 and threadID_in_group q = l % 4 (the names in the PTX manual). PTX assigns
// these elements to its registers:
//
//     A  a0: row r,     k = 2q, 2q + 1       B  b0: k = 2q, 2q + 1,     column r     D  d0: D[r][2q]
//        a1: row r + 8, k = 2q, 2q + 1          b1: k = 2q + 8, 2q + 9, column r        d1: D[r][2q + 1]
//        a2: row r,     k = 2q + 8, 2q + 9                                              d2: D[r + 8][2q]
//        a3: row r + 8, k = 2q + 8, 2q + 9                                              d3: D[r + 8][2q + 1]
//
// We multiply 8 rows of weights, one of each slice, by one vector x. Lane l loads 16 bytes of row r, the
// columns 8q .. 8q + 7, which are a0 .. a3 as they come: half of them in each of two rows of A. The columns of
// B hold the matching halves of x in turn, called quads below:
//
//     weights[r][8q + 0 1 4 5]  as a0, a2: row r of A        x[8q + 0 1 4 5]  as b0, b1: even columns of B
//     weights[r][8q + 2 3 6 7]  as a1, a3: row r + 8 of A    x[8q + 2 3 6 7]  as b0, b1: odd columns of B
//
// So D[r][even] is the product of the one half and D[r + 8][odd] that of the other. Every lane of group r has
// one of each, d0 and d3: their sum is the product of row r with 32 columns of x. d1 and d2 mix the halves and
// are not used.
//
// B has room for the vectors of four tokens, in columns 0 and 1, 2 and 3, 4 and 5, 6 and 7: lane l holds that
// of token l / 8, and its d0 and d3 belong to token q. With fewer tokens, the free columns of B take other columns
// of x: B then has the quads of SLOTS = 4 / TOKENS mma steps, so that no two lanes hold the same quad,
//
//     lane l      token l / 8 % TOKENS,  slot l / 8 / TOKENS: of the steps with step % SLOTS == slot
//     d0 and d3   token q % TOKENS,      slot q / TOKENS
//
// and each of these steps has a D of its own, of which only the columns of its slot are used. More than four tokens
// are processed in groups of four: the weights that a lane has loaded are multiplied by the B of each group, and a
// lane holds the vector of one token of each group.

#include "kernels.h"
#include "barriers.h"
#include "sampler.h"


// ---- Sizes

constexpr int WARPS = 8;
constexpr int CONSUMERS = WARPS * 32;       // threads that compute
constexpr int SLICES = 8;                   // of a block's rows; a stage has one row of each
constexpr int PRODUCERS = BULK_COPIES ? SLICES : 32;                // threads that copy weights
constexpr int STAGE_COLUMNS = 1024;
constexpr int STAGE_ROW_BYTES = STAGE_COLUMNS * 2;
constexpr int STEPS_PER_STAGE = STAGE_COLUMNS / (WARPS * 32);       // mma steps of 32 columns for each warp

constexpr bool IS_TALKER = CODES == 1;
constexpr int MMA_TOKENS = 4;                                       // tokens whose vectors fit into operand B
// Positions of a row in the predictor's first pass.
constexpr int FIRST_POSITIONS = !IS_TALKER && 2 * ROWS <= MMA_TOKENS ? 2 : 1;
constexpr int MAX_TOKENS = FIRST_POSITIONS * ROWS;                  // in a pass
constexpr int CODE_SLOTS = ROWS < 4 ? 4 : ROWS;                     // codes are received in quads
constexpr int QUERY_SIZE = HEADS * HEAD_DIM;
constexpr int QKV_SIZE = QUERY_SIZE + 2 * KV_HEADS * HEAD_DIM;

// Attention has a block for each row, group of query heads and part of the positions. A group is the two
// heads that share a KV head, or, in the predictor, one head if there are blocks enough: it has few positions.
constexpr int GROUP_HEADS = !IS_TALKER && ROWS * HEADS <= GRID ? 1 : 2;
constexpr int GROUPS = HEADS / GROUP_HEADS;

// Parts of the positions: a power of two, because shuffles merge them.
__device__ constexpr int max_splits() {
    int splits = 1;
    while (splits < 32 && 2 * splits * GROUPS * ROWS <= GRID) {
        splits *= 2;
    }
    return splits;
}
constexpr int SPLITS = IS_TALKER ? max_splits() : 1;

// With few positions, a block of the talker computes one head and 1/HEAD_SLICES of its dimensions, if there are
// enough blocks for that; else HEAD_SLICES is 0. It is also 0 for an odd number of layers: see the tags below.
__device__ constexpr int head_slices() {
    const int blocks = GROUPS * SPLITS;               // for each row
    if (!IS_TALKER || LAYERS % 2 == 1) {
        return 0;
    }
    return 4 * HEADS <= blocks ? 4 : 2 * HEADS <= blocks ? 2 : HEADS <= blocks && ROWS == 1 ? 1 : 0;
}
constexpr int HEAD_SLICES = head_slices();
constexpr int FEW_GROUPS = 4;                                       // groups of 8 positions per warp
constexpr int FEW_POSITIONS = HEAD_SLICES > 0 ? FEW_GROUPS * 8 * WARPS : -1;
constexpr int ATTENTION_BLOCKS = ROWS * GROUPS * SPLITS;
constexpr int POSITION_STRIDE = SPLITS * WARPS;                     // between two positions of the same warp
constexpr int KV_PREFETCH = IS_TALKER ? 4 : 2;                      // keys and values in flight per warp
constexpr int SCORES_PER_THREAD = VOCAB / CONSUMERS;                // in the sampler

// How the vectors that all blocks read are exchanged, see the top.
constexpr bool PACKED = ROWS > MMA_TOKENS;                          // then every pass has the same number of tokens
constexpr int BUFFERS = PACKED ? 4 : 1;
constexpr int VALUES_PER_WORD = PACKED ? 2 : 1;
constexpr u32 EMPTY = 0xffff;                                       // a NaN; the NaNs that are computed are 0x7fff

// Copies of Exchange, against contention between the readers of a cache line. By measurement on an H200: four
// are best for one row, one is 4 % slower; for eight rows one is best, four are 3 % slower.
constexpr int REPLICAS = PACKED ? 1 : 4;
constexpr int LOGITS_COPIES = ROWS == 1 ? REPLICAS : 1;             // with several rows, each has one reader

// Upper limits of the rows of a matrix that one block has, see Share.
template <int MATRIX_ROWS>
constexpr int MAX_ROWS_PER_SLICE = (MATRIX_ROWS / SLICES + GRID - 1) / GRID;
template <int MATRIX_ROWS>
constexpr int MAX_ROWS = SLICES * MAX_ROWS_PER_SLICE<MATRIX_ROWS>;
constexpr int SECOND_REGION = 2 * MAX_ROWS<INNER>;                  // where that region of Shared::partial begins

// Stages of a matrix that are loaded into registers before its vector arrives. More would spill.
template <int TOKENS>
constexpr int REGISTER_STAGES = TOKENS >= MMA_TOKENS ? 0 : 5;

// The input of down_proj is received and multiplied in panels of this many columns, so that the values of all tokens
// in a panel fit into the registers.
constexpr int PANEL_COLUMNS = ROWS <= MMA_TOKENS ? INNER : ROWS == 8 && INNER % 3072 == 0 ? 3072 : 1024;

// Fraction of the weights to keep in L2. The predictor reads its layers 15 or 16 times per launch. By
// measurement on an H200: of 10, 15, 20, 25 and 30 %, 15 % is fastest, and 30 % is slower than none. On GPUs
// with less L2 it is the fraction that takes half of it. The talker reads its weights once: it keeps the
// smallest fraction (createpolicy does not take 0).
constexpr float LAYER_BYTES = 2.0f * LAYERS * HIDDEN * (QKV_SIZE + QUERY_SIZE + 3 * INNER);
constexpr float HALF_L2_FRACTION = 0.5f * L2_BYTES / LAYER_BYTES;
constexpr float MIN_FRACTION = 0.001f;
constexpr float MAX_FRACTION = IS_TALKER ? MIN_FRACTION : 0.15f;
constexpr float L2_KEEP_FRACTION = HALF_L2_FRACTION < MIN_FRACTION ? MIN_FRACTION
                                   : HALF_L2_FRACTION < MAX_FRACTION ? HALF_L2_FRACTION : MAX_FRACTION;

// How long a launch may last before its waits time out. The longest takes about 60 ms on GPUs with slow memory,
// and other programs may use the GPU at the same time.
constexpr u64 WAIT_LIMIT_NS = 2'000'000'000;
constexpr u32 SPINS_PER_CHECK = 64;                                 // loop iterations between reads of the clock

static_assert(LAYERS >= 1 && CODES >= 1, "unsupported sizes: LAYERS and CODES must be at least 1");
static_assert(!IS_TALKER || TALKER_HIDDEN == HIDDEN, "unsupported sizes: TALKER_HIDDEN must be the talker's");
static_assert(ROWS == 1 || ROWS == 2 || ROWS == 4 || ROWS == 8 || ROWS == 16,
              "unsupported sizes: ROWS must be 1, 2, 4, 8 or 16");

// Tags repeat every 2^16 layers. Each value is rewritten in every launch, so a stale one cannot match as long
// as a launch has fewer layers than that. Only `splits` may be older, from the last layer of any earlier launch:
// with an even number of layers that epoch is even, and the first layer, which rewrites them, has an odd one.
static_assert(LAYERS * (CODES + 1) < 1 << 16, "unsupported sizes: LAYERS * (CODES + 1) must be below 65536");

// Each lane has 4 dimensions of a head, and each of the 256 consumers one output of at most 2 query heads.
static_assert(HEAD_DIM == 128, "unsupported sizes: HEAD_DIM must be 128");
static_assert(HEADS == 2 * KV_HEADS, "unsupported sizes: HEADS must be twice KV_HEADS");

// The input of a matrix is multiplied in stages of 1024 columns.
static_assert(HIDDEN % STAGE_COLUMNS == 0, "unsupported sizes: HIDDEN must be a multiple of 1024");
static_assert(INNER % STAGE_COLUMNS == 0, "unsupported sizes: INNER must be a multiple of 1024");
static_assert(QUERY_SIZE % STAGE_COLUMNS == 0,
              "unsupported sizes: HEADS * HEAD_DIM must be a multiple of 1024");

// Rows of INNER columns are copied in panels: only down_proj may have such rows.
static_assert(PANEL_COLUMNS == INNER || (HIDDEN < INNER && QUERY_SIZE < INNER),
              "unsupported sizes: for 8 rows INNER must be more than HIDDEN and HEADS * HEAD_DIM");

// In the sampler each thread loads four logits at a time, and a token has TOKEN_BITS bits.
static_assert(VOCAB % (4 * CONSUMERS) == 0, "unsupported sizes: VOCAB must be a multiple of 1024");
static_assert(VOCAB <= 1 << TOKEN_BITS, "unsupported sizes: VOCAB must be at most 4096");

// Rows come in groups of 8, one for each slice, and every block has a group of each matrix.
static_assert(GRID >= 8 && GRID <= 128, "unsupported sizes: GRID must be from 8 to 128");
static_assert(QKV_SIZE / SLICES >= GRID, "unsupported sizes: the rows of q, k, v must be at least 8 * GRID");
static_assert(HIDDEN / SLICES >= GRID, "unsupported sizes: HIDDEN must be at least 8 * GRID");
static_assert(INNER / SLICES >= GRID, "unsupported sizes: INNER must be at least 8 * GRID");
static_assert(VOCAB / SLICES >= GRID, "unsupported sizes: VOCAB must be at least 8 * GRID");

// A thread keeps the residual of one row and token in a register.
static_assert(MAX_TOKENS * MAX_ROWS<HIDDEN> <= CONSUMERS,
              "unsupported sizes: HIDDEN * tokens must be at most 256 * GRID");

// The first region of Shared::partial has room for gate and up. It also serves q, k, v and the heads.
static_assert(MAX_ROWS<QKV_SIZE> <= SECOND_REGION,
              "unsupported sizes: the rows of q, k, v must be at most 2 * INNER");
static_assert(MAX_ROWS<VOCAB> <= SECOND_REGION, "unsupported sizes: VOCAB must be at most 2 * INNER");

// Attention needs at least one block for each row and KV head.
static_assert(GRID >= ROWS * KV_HEADS, "unsupported sizes: GRID must be at least ROWS * KV_HEADS");

// The predictor's last phase has a thread for each element of the talker's hidden states.
static_assert(ROWS * TALKER_HIDDEN <= GRID * CONSUMERS,
              "unsupported sizes: ROWS * TALKER_HIDDEN must be at most 256 * GRID");


// ---- Memory

// megakernel.py writes these three and checks their layout when it compiles. All fields are 8 bytes.
struct Matrix {
    const char *address;                              // (rows, columns) of bfloat16, row after row
    u64 rows;                                         // 0 ends the list
    u64 row_bytes;
};

struct Layer {                                        // u32: two bfloat16, uint2: four
    const u32 *input_norm;                            // (HIDDEN)
    const u32 *post_norm;                             // (HIDDEN)
    const uint2 *q_norm;                              // (HEAD_DIM)
    const uint2 *k_norm;                              // (HEAD_DIM)
    uint2 *keys;                                      // (ROWS, KV_HEADS, cache_length, HEAD_DIM)
    uint2 *values;                                    // (ROWS, KV_HEADS, cache_length, HEAD_DIM)
};

struct Exchange;

struct Arguments {
    const Matrix *matrices;                           // in the order of their use
    const Layer *layers;                              // (LAYERS)
    u64 cache_length;
    const u32 *final_norm;                            // (HIDDEN)
    const uint2 *cos;                                 // (cache_length, HEAD_DIM)
    const uint2 *sin;                                 // (cache_length, HEAD_DIM), its first half negated
    Exchange *exchange;                               // (REPLICAS)
    u32 *epoch;                                       // layers begun so far, over all launches
    u32 *failed;                                      // 0, or what a thread has waited for too long
    volatile u32 *failed_on_host;                     // the same, in pinned host memory
    const bool *advance;                              // (ROWS), whether its state may change
    const float *temperature;                         // (ROWS), and so are the next three
    const u64 *topk_rank;                             // rank of the k-th best score, counted from the worst
    const float *one_minus_top_p;
    const bool *greedy;
    const float *noise;                               // (ROWS, CODES, VOCAB), exponentially distributed
    u64 *token;                                       // (ROWS), first code of the frame
    u64 *frame;                                       // (ROWS)
    u32 *hidden;                                      // (ROWS, TALKER_HIDDEN), of the talker
    bf16 *embedding;                                  // (ROWS, TALKER_HIDDEN), the talker's next input
#if CODES == 1  // the talker
    const u64 *prompt_length;                         // (ROWS)
    bool *seen;                                       // (ROWS, VOCAB), tokens to apply the penalty to
    const bool *suppressed;                           // (ROWS, VOCAB), tokens never to choose
    const float *repetition_penalty;                  // (ROWS), and so are the next three
    const u64 *end_token;
    const u64 *min_tokens;
    bool *ended;                                      // whether the end token has been chosen
#else  // the predictor
    const bf16 *first_input;                          // (ROWS, HIDDEN), the hidden states, projected
    const bf16 *const *code_inputs;                   // CODES + 1 tables (codes, HIDDEN), projected
    const bf16 *const *code_embeddings;               // CODES + 1 tables (codes, TALKER_HIDDEN)
    u64 frames;                                       // in each of the next two
    const bf16 *text;                                 // (ROWS, frames, TALKER_HIDDEN)
    u64 *codes;                                       // (ROWS, frames, CODES + 1)
#endif
};

// The values that blocks send each other. Each u32 is epoch << 16 | bfloat16; if PACKED, it is two bfloat16 in the
// vectors that are in the order of place_of.
struct Activations {                                  // of one token, in the order of place_of, but for qkv
    u32 hidden[HIDDEN / VALUES_PER_WORD];             // residual stream after the MLP
    u32 post_attention[HIDDEN / VALUES_PER_WORD];     // residual stream after attention
    u32 qkv[QKV_SIZE];                                // before norm and RoPE
    u32 attention[QUERY_SIZE / VALUES_PER_WORD];      // input of o_proj
    u32 inner[INNER / VALUES_PER_WORD];               // input of down_proj
};

// Every replica begins at a cache line: by measurement on an H200, an offset of 16 bytes makes a step 8 % slower.
struct alignas(128) Exchange {
    u32 logits[ROWS][CODES][VOCAB];
    Activations tokens[BUFFERS][MAX_TOKENS];
    u32 splits[ROWS][HEADS][SPLITS][HEAD_DIM][4];     // output and log-sum-exp, each as two bfloat16
    u32 codes[CODE_SLOTS];                            // the chosen codes, as integers; entry i belongs to
                                                      // row i % ROWS
};
static_assert(OFFSET_OF(Exchange, logits) == 0, "megakernel.py reads the logits at the start of Exchange");
static_assert(OFFSET_OF(Exchange, tokens) == sizeof(u32) * ROWS * CODES * VOCAB,
              "megakernel.py reads the first token's activations after the logits");
static_assert(sizeof(Exchange) <= EXCHANGE_BYTES,
              "unsupported sizes: EXCHANGE_BYTES is too small for Exchange");

struct Stage {
    char rows[SLICES][STAGE_ROW_BYTES + 64];          // padded: 8 lanes load at a time, 64 bytes of each of
                                                      // 2 adjacent rows, which must be in different banks
    u64 full;
    u64 empty;
};

// The start of a block's shared memory. The ring of stages follows it.
struct alignas(16) Shared {
    // attention: of each warp's positions
    Quad head_sum[WARPS][GROUP_HEADS][HEAD_DIM / 4];  // values times weights
    float head_max[WARPS][GROUP_HEADS];               // highest score
    float head_weight[WARPS][GROUP_HEADS];            // sum of the weights
    // matvec: dot products of each warp's columns
    float partial[MAX_TOKENS][WARPS][SECOND_REGION + MAX_ROWS<HIDDEN>];
    // rms_norm: sums of squares of each warp
    float squares[MAX_TOKENS][WARPS];
    SamplerShared<WARPS> sampler;
    // timed_out
    u64 deadline;
    u32 *failed;
    volatile u32 *failed_on_host;
};

static_assert(sizeof(Shared) + 2 * sizeof(Stage) <= SHARED_BYTES,
              "unsupported sizes: SHARED_BYTES is too small for two stages of weights");
constexpr int STAGES = (SHARED_BYTES - sizeof(Shared)) / sizeof(Stage);
// Stages that may be in flight from memory at a time. By measurement on an H200, for one row: more than two slow the
// exchange between blocks down by 4 %; but layers that keep the memory busy all the time need five.
constexpr int MAX_ON_THEIR_WAY = !BULK_COPIES || ROWS > 1 ? STAGES : HIDDEN > 1024 ? 5 : 2;
constexpr int STAGES_ON_THEIR_WAY = MAX_ON_THEIR_WAY < STAGES ? MAX_ON_THEIR_WAY : STAGES;
static_assert(STAGES <= CONSUMERS + PRODUCERS,
              "unsupported sizes: SHARED_BYTES must not be for more stages than a block has threads");
static_assert(sizeof(Stage) % 16 == 0, "bulk copies go to multiples of 16 bytes");


// ---- PTX instructions, one function each
// For a run on a CPU, tests/gpu_on_cpu.h defines functions of the same names.

__device__ Shared &shared() {
    return dynamic_shared<Shared>();
}

#ifndef ON_CPU

// Relaxed accesses at GPU scope go to L2: they see what other blocks wrote. They do not order other accesses,
// and need not: each word shows by itself whether it has been written.
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

__device__ void store_relaxed_16(void *address, u32 value) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" :: "l"(address), "h"((bf16)value) : "memory");
}

template <int BARRIER, int THREADS>
__device__ void named_barrier_sync() {
    asm volatile("bar.sync %0, %1;" :: "n"(BARRIER), "n"(THREADS) : "memory");
}

// Nanoseconds, the same on all multiprocessors.
__device__ u64 global_timer() {
    u64 nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// An L2 policy that evicts this fraction of the lines last and the others first.
__device__ u64 l2_policy(float keep_fraction) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %0, %1;"
        : "=l"(policy)
        : "f"(keep_fraction));
    return policy;
}

#if BULK_COPIES

// Orders this thread's accesses of shared memory before the bulk copies that follow; a barrier alone does not.
__device__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Global to shared memory, asynchronously; when done, completes this many bytes of the barrier's phase.
template <int BYTES>
__device__ void bulk_copy_to_shared(void *destination, const void *source, u64 *barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;"
                 :: "r"(shared_address(destination)), "l"(source), "n"(BYTES), "r"(shared_address(barrier)),
                    "l"(policy)
                 : "memory");
}

#else

// 16 bytes from global to shared memory, asynchronously.
__device__ void async_copy_to_shared(void *destination, const void *source, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 :: "r"(shared_address(destination)), "l"(source), "l"(policy)
                 : "memory");
}

// Arrives when all asynchronous copies of this thread up to now are complete.
__device__ void mbarrier_arrive_after_copies(u64 *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(shared_address(barrier)) : "memory");
}

__device__ void wait_for_async_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif
#endif


// ---- Small helpers

// Not __syncthreads(), which would also wait for the producers.
__device__ void sync_consumers() {
    named_barrier_sync<1, CONSUMERS>();
}

// The rows of a matrix that this block has. All blocks have the same number, or the last ones 8 more. They are
// contiguous in memory, and so are those of each slice:
//     slice s  ->  rows_per_slice rows, beginning at first_row + s * rows_per_slice
struct Share {
    int first_row;
    int rows_per_slice;
};

// `rows` being a constant, so is rows_per_slice where all blocks have the same number.
__device__ Share share_of_this_block(int rows) {
    const int groups = rows / SLICES;
    const int at_least = groups / GRID;
    const int blocks_with_more = groups % GRID;
    const int blocks_with_less = GRID - blocks_with_more;
    const int block = blockIdx.x;
    if (blocks_with_more == 0 || block < blocks_with_less) {
        return {SLICES * block * at_least, at_least};
    }
    return {SLICES * (block * at_least + block - blocks_with_less), at_least + 1};
}

// Tokens in groups of four, see the lane map at the top.
__device__ constexpr int groups_of(int tokens) {
    return (tokens + MMA_TOKENS - 1) / MMA_TOKENS;
}

// The token of a group whose vectors this lane holds.
__device__ int token_of_lane(int group, int tokens) {
    return group * MMA_TOKENS + lane_index() / 8 % tokens;
}

// With fewer than four, operand B has the vectors of SLOTS mma steps side by side, see the lane map as well.
template <int TOKENS>
constexpr int SLOTS = TOKENS < MMA_TOKENS ? MMA_TOKENS / TOKENS : 1;

// What a lane holds of a vector of SIZE elements of one token, and of those of all its tokens.
template <int TOKENS>
constexpr int QUADS_PER_PART = STEPS_PER_STAGE / SLOTS<TOKENS>;             // a part is 1024 elements
template <int TOKENS, int SIZE>
using Vector = uint2[SIZE / STAGE_COLUMNS * QUADS_PER_PART<TOKENS>];
template <int TOKENS, int SIZE>
using Vectors = Vector<TOKENS, SIZE>[groups_of(TOKENS)];


// ---- Time limit of all waits

// What a thread was waiting for when its time was up; megakernel.py has a message for each. A warp that waits
// for other blocks does not release its stages: soon its producers wait for a free stage, and other warps for
// weights. The limits of these waits are longer, so that the cause is reported, not its consequences.
constexpr u32 WAITED_FOR_BLOCKS = 1;
constexpr u32 WAITED_FOR_WEIGHTS = 2;
constexpr u32 WAITED_FOR_FREE_STAGE = 3;
constexpr u64 LIMIT_STEP_NS = 250'000'000;            // between their limits

__device__ void set_deadline(u32 *failed, volatile u32 *failed_on_host) {
    shared().deadline = global_timer() + WAIT_LIMIT_NS;
    shared().failed = failed;
    shared().failed_on_host = failed_on_host;
}

// Whether to stop waiting, because the time of this wait is up or another thread has failed. Not inlined: it is
// rarely called, from many places.
__device__ __noinline__ bool timed_out(u32 waiting_for) {
    if (load_relaxed(shared().failed)) {
        return true;
    }
    if (global_timer() < shared().deadline + (waiting_for - 1) * LIMIT_STEP_NS) {
        return false;
    }
    store_relaxed(shared().failed, waiting_for);
    *shared().failed_on_host = waiting_for;
    return true;
}


// ---- Exchange between blocks

// Which blocks share a replica does not matter much, by measurement.
__device__ const Exchange &replica_of_this_block(const Exchange *exchange) {
    return exchange[blockIdx.x / 8 % REPLICAS];
}

// Writes 16 bits, or a value, to the first COPIES replicas. `destination` is the address in the first one.
template <int COPIES = REPLICAS>
__device__ void publish_bits(u32 *destination, u32 bits, u32 epoch) {
#pragma unroll
    for (int replica = 0; replica < COPIES; ++replica) {
        store_relaxed((char *)destination + replica * sizeof(Exchange), epoch << 16 | bits);
    }
}

template <int COPIES = REPLICAS>
__device__ void publish(u32 *destination, float value, u32 epoch) {
    publish_bits<COPIES>(destination, pack_bf16x2(value, 0), epoch);
}

// values[i] = the four elements at quad(i), once all of them are of this epoch.
template <int N, class Quad>
__device__ void receive(uint2 (&values)[N], u32 epoch, Quad quad) {
    const u32 tag = epoch << 16;
    uint4 tagged[N];
    u32 mismatch;
    u32 spins = 0;
    do {
        // Issue all loads before checking any of them.
#pragma unroll
        for (int i = 0; i < N; ++i) {
            tagged[i] = load_relaxed_x4(quad(i));
        }
        mismatch = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            mismatch |= (tagged[i].x ^ tag) | (tagged[i].y ^ tag) | (tagged[i].z ^ tag) | (tagged[i].w ^ tag);
        }
        ++spins;
        if (spins % SPINS_PER_CHECK == 0 && timed_out(WAITED_FOR_BLOCKS)) {
            break;
        }
    } while (mismatch >> 16);

    // Keep the low halves: two bfloat16 to a register.
#pragma unroll
    for (int i = 0; i < N; ++i) {
        values[i].x = __byte_perm(tagged[i].x, tagged[i].y, 0x5410);
        values[i].y = __byte_perm(tagged[i].z, tagged[i].w, 0x5410);
    }
}


// ---- Ring of weight stages

// A position in the ring: a slot, and how often it has been used before, modulo 2. That is the parity of the phase
// of `full` to wait for.
struct Cursor {
    u32 slot = 0;
    u32 parity = 0;
};

__device__ void advance(Cursor &cursor) {
    const bool is_last = cursor.slot == STAGES - 1;
    cursor.slot = is_last ? 0 : cursor.slot + 1;
    cursor.parity ^= is_last;
}

// With MEGAKERNEL_PLAIN_COPIES the ring is filled by ordinary stores and every consumer arrives for itself.
// This is for compute-sanitizer's racecheck, which understands neither bulk copies nor a lane that arrives for
// its warp.
#ifdef MEGAKERNEL_PLAIN_COPIES
constexpr int ARRIVALS_TO_EMPTY = CONSUMERS;
#else
constexpr int ARRIVALS_TO_EMPTY = WARPS;
#endif

__device__ Stage &ring_slot(u32 slot) {
    Stage *ring = (Stage *)(&shared() + 1);
    return ring[slot];
}

__device__ void init_barrier(Stage &slot) {
    mbarrier_init<PRODUCERS>(&slot.full);
    mbarrier_init<ARRIVALS_TO_EMPTY>(&slot.empty);
}

__device__ void mbarrier_wait(u64 *barrier, u32 parity, u32 waiting_for) {
    u32 spins = 0;
    while (!mbarrier_try_wait(barrier, parity)) {
        ++spins;
        if (spins % SPINS_PER_CHECK == 0 && timed_out(waiting_for)) {
            break;
        }
    }
}

__device__ void wait_until_full(Cursor cursor) {
    mbarrier_wait(&ring_slot(cursor.slot).full, cursor.parity, WAITED_FOR_WEIGHTS);
}

// In the first round this waits for the phase before the first, which counts as complete: slots start empty.
__device__ void wait_until_empty(Cursor cursor) {
    mbarrier_wait(&ring_slot(cursor.slot).empty, cursor.parity ^ 1, WAITED_FOR_FREE_STAGE);
}

// Called by each producer: copies its part of the stage, whose rows begin at `source`, `stride` bytes apart.
__device__ void fill(Cursor cursor, int producer, const char *source, u64 stride, u64 policy) {
    Stage &slot = ring_slot(cursor.slot);
#if BULK_COPIES && !defined(MEGAKERNEL_PLAIN_COPIES)
    mbarrier_arrive_expect_tx(&slot.full, STAGE_ROW_BYTES);
    bulk_copy_to_shared<STAGE_ROW_BYTES>(slot.rows[producer], source + producer * stride, &slot.full, policy);
#else
    // All producers together copy consecutive bytes.
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
#pragma unroll
        for (int first = 0; first < STAGE_ROW_BYTES; first += PRODUCERS * 16) {
            char *to = slot.rows[slice] + first + producer * 16;
            const char *from = source + slice * stride + first + producer * 16;
#ifdef MEGAKERNEL_PLAIN_COPIES
            *(uint4 *)to = *(const uint4 *)from;
#else
            async_copy_to_shared(to, from, policy);
#endif
        }
    }
#ifdef MEGAKERNEL_PLAIN_COPIES
    mbarrier_arrive(&slot.full);
#else
    mbarrier_arrive_after_copies(&slot.full);
#endif
#endif
}

// Called by each consumer warp when it has read its columns. Without the fence the next bulk copy could overtake
// loads that had been issued before: for 16 rows a value was wrong in one of 20 to 4,000 launches.
__device__ void release(Cursor cursor) {
#if BULK_COPIES
    fence_proxy_async();
#endif
    __syncwarp();                                     // all lanes have read
#ifdef MEGAKERNEL_PLAIN_COPIES
    mbarrier_arrive(&ring_slot(cursor.slot).empty);
#else
    if (lane_index() == 0) {
        mbarrier_arrive(&ring_slot(cursor.slot).empty);
    }
#endif
}

// The loop of a producer: copies the block's rows of every matrix, 1024 columns of a row of each slice at a
// time; those of down_proj panel after panel.
__device__ void produce_weights(const Matrix *matrix, int producer) {
    const u64 policy = l2_policy(L2_KEEP_FRACTION);
    Cursor cursor;
    Cursor oldest_on_its_way;
    int on_their_way = 0;
    for (; matrix->rows; ++matrix) {
        const Share share = share_of_this_block(matrix->rows);
        const u64 bytes_per_slice = share.rows_per_slice * matrix->row_bytes;
        const char *first_row = matrix->address + share.first_row * matrix->row_bytes;
        // Row after row; of down_proj, panel after panel.
        const bool has_panels = PANEL_COLUMNS < INNER && matrix->row_bytes == 2 * INNER;
        const u64 panel_bytes = has_panels ? 2 * PANEL_COLUMNS : matrix->row_bytes;
        for (u64 panel = 0; panel < matrix->row_bytes; panel += panel_bytes) {
            for (u64 row = 0; row < bytes_per_slice; row += matrix->row_bytes) {
                for (u64 column = panel; column < panel + panel_bytes; column += STAGE_ROW_BYTES) {
                    const char *source = first_row + row + column;
                    wait_until_empty(cursor);
                    if (on_their_way == STAGES_ON_THEIR_WAY) {
                        wait_until_full(oldest_on_its_way);
                        advance(oldest_on_its_way);
                    } else {
                        ++on_their_way;
                    }
                    fill(cursor, producer, source, bytes_per_slice, policy);
                    advance(cursor);
                }
            }
        }
    }
#if !BULK_COPIES
    wait_for_async_copies();
#endif
}


// ---- Matrix times vector

// A vector is spread over the consumers as the operand B of the mma steps. Quads 2 n and 2 n + 1 are elements
// 0 1 4 5 and 2 3 6 7 of 8 n .. 8 n + 7. Of each 1024 columns, a part, a warp has 4 steps of 32 columns, and lane
// 4 r + q has these quads, for every step of its slot:
//     part * 256 + warp * 32 + step * 8 + q * 2 + r % 2
template <int TOKENS>
__device__ int quad_of_vector(int i) {
    const int part = i / QUADS_PER_PART<TOKENS>;
    const int slot = SLOTS<TOKENS> == 1 ? 0 : threadIdx.x % 32 / 8 / TOKENS;
    const int step = i % QUADS_PER_PART<TOKENS> * SLOTS<TOKENS> + slot;
    return part * 256 + threadIdx.x / 32 * 32 + step * 8 + threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2;
}

// Vectors in Exchange have quad after quad: elements 0 1 4 5 2 3 6 7 8 9 12 13 10 11 14 15 ... If PACKED, those
// of two steps of a lane are neighbours: it loads them together.
__device__ int place_of_quad(int quad) {
    return PACKED ? quad / 16 * 16 + quad % 8 * 2 + quad / 8 % 2 : quad;
}

__device__ int place_of(int element) {
    const int place = element / 8 * 8 + element % 4 / 2 * 4 + element % 8 / 4 * 2 + element % 2;
    return PACKED ? place_of_quad(place / 4) * 4 + place % 4 : place;
}

// An element of a vector of Activations, to all blocks.
template <int WORDS>
__device__ void publish_element(Exchange *exchange, u32 (Activations::*vector)[WORDS], int token, int element,
                                float value, u32 epoch) {
    if constexpr (PACKED) {
        const auto address = [&](u32 of_epoch) {
            return (bf16 *)(exchange->tokens[of_epoch % BUFFERS][token].*vector) + place_of(element);
        };
        store_relaxed_16(address(epoch), pack_bf16x2(value, 0));
        store_relaxed_16(address(epoch + 2), EMPTY);
    } else {
        publish(&(exchange->tokens[0][token].*vector)[place_of(element)], value, epoch);
    }
}

// Receives a vector of each of TOKENS tokens, of which the first is `first_token`, from first_column on.
template <int TOKENS, int WORDS, int G, int N>
__device__ void receive_vectors(uint2 (&x)[G][N], const Exchange &replica, u32 (Activations::*vector)[WORDS],
                                u32 epoch, int first_token = 0, int first_column = 0) {
    const auto vector_of = [&](int group) -> const u32 * {
        return replica.tokens[epoch % BUFFERS][first_token + token_of_lane(group, TOKENS)].*vector;
    };
    const auto quad = [&](int i) {
        return quad_of_vector<TOKENS>(first_column / STAGE_COLUMNS * QUADS_PER_PART<TOKENS> + i);
    };
    if constexpr (!PACKED) {
#pragma unroll
        for (int group = 0; group < G; ++group) {
            const u32 *words = vector_of(group);
            receive(x[group], epoch, [&](int i) { return words + 4 * quad(i); });
        }
        return;
    }
    u32 highest;                                      // of the upper and of the lower halves; EMPTY is the highest
    u32 spins = 0;
    do {
        // Issue all loads before checking any of them.
#pragma unroll
        for (int group = 0; group < G; ++group) {
            const u32 *words = vector_of(group);
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                const uint4 quads = load_relaxed_x4(words + 2 * place_of_quad(quad(i)));
                x[group][i] = {quads.x, quads.y};
                x[group][i + 1] = {quads.z, quads.w};
            }
        }
        highest = 0;
#pragma unroll
        for (int group = 0; group < G; ++group) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                highest = __vmaxu2(highest, __vmaxu2(x[group][i].x, x[group][i].y));
            }
        }
        ++spins;
        if (spins % SPINS_PER_CHECK == 0 && timed_out(WAITED_FOR_BLOCKS)) {
            break;
        }
    } while (highest >> 16 == EMPTY || (highest & 0xffff) == EMPTY);
}

// Other vectors have their elements in order, in pairs: a quad is the pairs first_pair(quad) and + 2.
__device__ int first_pair(int quad) {
    return quad / 2 * 4 + quad % 2;
}

template <int TOKENS, int N>
__device__ void load_vector(uint2 (&x)[N], const u32 *source) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int pair = first_pair(quad_of_vector<TOKENS>(i));
        x[i] = {source[pair], source[pair + 2]};
    }
}

// d += 8 rows of weights times 32 columns of x. A lane's weights are 8 columns of row r, its x is one quad.
__device__ void multiply_add(float (&d)[4], uint4 weights, uint2 x) {
    mma_m16n8k16(d, weights.x, weights.y, weights.z, weights.w, x.x, x.y);
}

// The next matrix in the ring, or a panel of it. Its first stages, at most MOST, are loaded ahead into registers;
// none where the loop over the rows is not unrolled, because registers cannot be indexed.
template <int TOKENS, int MATRIX_ROWS, int COLUMNS, int MOST = REGISTER_STAGES<TOKENS>>
struct Weights {
    static constexpr int PARTS = COLUMNS / STAGE_COLUMNS;
    static constexpr int MAX = MAX_ROWS_PER_SLICE<MATRIX_ROWS>;
    static constexpr bool IS_UNROLLED = BULK_COPIES && MAX <= 8 && TOKENS <= MMA_TOKENS;     // more would spill
    static constexpr int STAGES_OF_BLOCK = MATRIX_ROWS / SLICES / GRID * PARTS;              // that every block has
    static constexpr int AHEAD = !IS_UNROLLED ? 0 : STAGES_OF_BLOCK < MOST ? STAGES_OF_BLOCK : MOST;
    uint4 stages[AHEAD > 0 ? AHEAD : 1][STEPS_PER_STAGE];
};

// A lane's part of a stage: of row r, 8 columns for each of the warp's 4 steps.
__device__ void load_stage(uint4 (&stage)[STEPS_PER_STAGE], Cursor &cursor) {
    wait_until_full(cursor);
    const char *columns = ring_slot(cursor.slot).rows[lane_index() / 4] + warp_index() * 256;
#pragma unroll
    for (int step = 0; step < STEPS_PER_STAGE; ++step) {
        stage[step] = ((const uint4 *)columns)[step * 4 + lane_index() % 4];
    }
    release(cursor);
    advance(cursor);
}

template <int TOKENS, int MATRIX_ROWS, int COLUMNS, int MOST>
__device__ void load_ahead(Weights<TOKENS, MATRIX_ROWS, COLUMNS, MOST> &weights, Cursor &cursor) {
#pragma unroll
    for (int i = 0; i < Weights<TOKENS, MATRIX_ROWS, COLUMNS, MOST>::AHEAD; ++i) {
        load_stage(weights.stages[i], cursor);
    }
}

// Weights times x. Of each stage, warp w takes columns 128 w .. 128 w + 127 of the 8 rows, in 4 mma steps of 32
// columns for each group of tokens. The sums of row number i of the block go to partial[token][w][region + i], or
// are added to what is there.
template <int TOKENS, int MATRIX_ROWS, int COLUMNS, int MOST>
__device__ void matvec(const Weights<TOKENS, MATRIX_ROWS, COLUMNS, MOST> &weights, const Vectors<TOKENS, COLUMNS> &x,
                       Cursor &cursor, int region, bool adds = false) {
    using W = Weights<TOKENS, MATRIX_ROWS, COLUMNS, MOST>;
    constexpr int UNROLLED = W::IS_UNROLLED ? W::MAX : 1;
    constexpr int G = groups_of(TOKENS);
    constexpr int SUMS = SLOTS<TOKENS> > 2 ? SLOTS<TOKENS> : 2;     // of each slot; at least two, so that an mma
                                                                    // does not wait for the previous one
    const int rows_per_slice = share_of_this_block(MATRIX_ROWS).rows_per_slice;
    const int slice = lane_index() / 4;               // r of the lane map
    const int q = lane_index() % 4;
#pragma unroll UNROLLED
    for (int row = 0; row < rows_per_slice; ++row) { // of the slice
        float d[G][SUMS][4] = {};
#pragma unroll
        for (int part = 0; part < W::PARTS; ++part) {
            const int i = row * W::PARTS + part;
            uint4 stage[STEPS_PER_STAGE];
            if (i >= W::AHEAD) {
                load_stage(stage, cursor);
            }
#pragma unroll
            for (int step = 0; step < STEPS_PER_STAGE; ++step) {
                const uint4 columns_of_row = i < W::AHEAD ? weights.stages[i][step] : stage[step];
                const int quad = part * QUADS_PER_PART<TOKENS> + step / SLOTS<TOKENS>;
#pragma unroll
                for (int group = 0; group < G; ++group) {
                    multiply_add(d[group][step % SUMS], columns_of_row, x[group][quad]);
                }
            }
        }
#pragma unroll
        for (int group = 0; group < G; ++group) {
            const auto of_sum = [&](int i) {
                return d[group][i][0] + d[group][i][3];
            };
            float sum = SLOTS<TOKENS> == 1 ? of_sum(0) + of_sum(1) : of_sum(0);
#pragma unroll
            for (int slot = 1; slot < SLOTS<TOKENS>; ++slot) {
                const float of_slot = of_sum(slot);
                sum = q / TOKENS == slot ? of_slot : sum;
            }
#pragma unroll
            for (int distance = TOKENS; distance < MMA_TOKENS; distance *= 2) {
                sum += __shfl_xor_sync(~0u, sum, distance);
            }
            const int token = group * MMA_TOKENS + q;
            if (token < TOKENS) {
                float &partial = shared().partial[token][warp_index()][region + slice * rows_per_slice + row];
                partial = adds ? partial + sum : sum;
            }
        }
    }
}

// A row's sum over the warps, each of which has its own columns.
__device__ float row_sum(int token, int row) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        sum += shared().partial[token][warp][row];
    }
    return round_to_bf16(sum);
}

// Calls use(token, row, sum) for each token and each row of the matrix that this block has, one thread per call.
//
// Consecutive matvecs use different regions of `partial`: the next may write its sums while slow threads
// still read those of this one. Only a head and the next pass's q, k, v use the same region in succession:
// the sync_consumers of rms_norm is between them.
template <int MATRIX_ROWS, int TOKENS, class Use>
__device__ void for_each_row(int region, Use use) {
    constexpr int MAX = MAX_ROWS<MATRIX_ROWS>;
    const Share share = share_of_this_block(MATRIX_ROWS);
    sync_consumers();                                 // the sums of all warps are there
#pragma unroll
    for (int first = 0; first < TOKENS * MAX; first += CONSUMERS) {
        const int token = (first + threadIdx.x) / MAX;
        const int i = (first + threadIdx.x) % MAX;    // counts the block's rows
        if (token < TOKENS && i < SLICES * share.rows_per_slice) {
            use(token, share.first_row + i, row_sum(token, region + i));
        }
    }
}


// ---- RMS norm

// Each token has its own sum, over the lanes that hold its vector. Between two norms there is a for_each_row, whose
// barrier all threads reach after they have read the sums of the first.
template <int TOKENS, int G, int N>
__device__ void rms_norm(uint2 (&x)[G][N], const uint2 (&weight)[N]) {
    float squares[G] = {};
#pragma unroll
    for (int group = 0; group < G; ++group) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            squares[group] += dot(unpack(x[group][i]), unpack(x[group][i]));
        }
    }
#pragma unroll
    for (int group = 0; group < G; ++group) {
        float of_warp = warp_sum<8>(squares[group]);
#pragma unroll
        for (int distance = 8 * TOKENS; distance < 32; distance *= 2) {
            of_warp += __shfl_xor_sync(~0u, of_warp, distance);
        }
        if (lane_index() == 8 * token_of_lane(0, TOKENS)) {
            shared().squares[token_of_lane(group, TOKENS)][warp_index()] = of_warp;
        }
    }
    sync_consumers();
#pragma unroll
    for (int group = 0; group < G; ++group) {
        const float(&of_warps)[WARPS] = shared().squares[token_of_lane(group, TOKENS)];
        float sum = of_warps[0];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) {
            sum += of_warps[warp];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            x[group][i] = normalize(x[group][i], rsqrtf(sum / HIDDEN + EPSILON), weight[i]);
        }
    }
}


// ---- Attention

// The row that this block attends for. Not used in blocks without attention.
__device__ int row_to_attend() {
    return blockIdx.x / (GROUPS * SPLITS) % ROWS;
}

// Where a position of this block's row is in the cache.
__device__ u64 place_in_cache(const Arguments &arguments, int kv_head, int position) {
    return (row_to_attend() * KV_HEADS + kv_head) * arguments.cache_length + position;
}

// The queries of QUERIES heads, the new key, the new value; a lane has 4 dimensions of each. One warp writes the new
// row of the cache. In the predictor, later positions of the same launch read it. Two blocks with one query head
// each write the same values, and each of them reads after its own write.
template <int QUERIES>
__device__ void receive_qkv(uint2 (&x)[QUERIES + 2], const Arguments &arguments, const Layer &layer, int token,
                            int position, int first_head, bool writes, u32 epoch) {
    constexpr int KEY = QUERIES;
    constexpr int VALUE = QUERIES + 1;
    constexpr int QUADS = HEAD_DIM / 4;               // of a head
    const int lane = lane_index();
    const int kv_head = first_head / 2;
    const uint2 cos = arguments.cos[position * QUADS + lane];
    const uint2 sin = arguments.sin[position * QUADS + lane];
    const uint2 q_weight = layer.q_norm[lane];
    const uint2 k_weight = layer.k_norm[lane];
    const u32 *qkv = replica_of_this_block(arguments.exchange).tokens[0][token].qkv;
    receive(x, epoch, [&](int i) {
        const int head = i < KEY ? first_head + i : HEADS + (i - KEY) * KV_HEADS + kv_head;
        return qkv + head * HEAD_DIM + lane * 4;
    });
#pragma unroll
    for (int i = 0; i <= KEY; ++i) {
        x[i] = norm_and_rope<32>(x[i], i < KEY ? q_weight : k_weight, cos, sin, EPSILON);
    }
    if (writes) {
        const u64 place = place_in_cache(arguments, kv_head, position);
        layer.keys[place * QUADS + lane] = x[KEY];
        layer.values[place * QUADS + lane] = x[VALUE];
    }
}

// Sums of 8 values over the 8 lanes of the same q: lane 4 r + q gets that of value r.
__device__ float sum_over_groups(float (&x)[8]) {
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        const bool is_upper = lane_index() / 4 & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = is_upper ? x[i + half] : x[i];
            const float sent = is_upper ? x[i] : x[i + half];
            x[i] = kept + __shfl_xor_sync(~0u, sent, 4 * half);
        }
    }
    return x[0];
}

// Attention to at most FEW_POSITIONS cached positions and the new one. Block b of a row takes query head
// b % HEADS, and of its dimensions slice b / HEADS:
//     group g of warp w:  positions 8 (8 g + w) .. + 7
//     lane 4 r + q:       position r of them; of the values dimensions 8 q .. + 7 of each 32
// Tensor cores multiply the keys of a group by the query, as 8 rows of weights by a vector.
__device__ void attend_to_few(const Arguments &arguments, const Layer &layer, int token, int position, u32 epoch) {
    constexpr int DIMENSIONS = HEAD_DIM / (HEAD_SLICES > 0 ? HEAD_SLICES : 1);
    constexpr int PARTS = DIMENSIONS / 32;            // of the values
    constexpr int VECTORS = HEAD_DIM / 8;             // uint4 of a cached row
    const int block = blockIdx.x % (GROUPS * SPLITS);
    const int head = block % HEADS;
    const int slice = block / HEADS;
    if (slice >= HEAD_SLICES) {
        return;
    }
    const int warp = warp_index();
    const int lane = lane_index();
    const int r = lane / 4;
    const int q = lane % 4;
    const auto position_of = [&](int group) {
        return (group * WARPS + warp) * 8 + r;
    };

    // Issue all loads that do not depend on this layer's q, k, v before waiting for those.
    const uint4 *keys = (const uint4 *)layer.keys + place_in_cache(arguments, head / 2, 0) * VECTORS;
    const uint4 *values = (const uint4 *)layer.values + place_in_cache(arguments, head / 2, 0) * VECTORS;
    uint4 k[FEW_GROUPS][4] = {};
    uint4 v[FEW_GROUPS][PARTS] = {};
#pragma unroll
    for (int g = 0; g < FEW_GROUPS; ++g) {
        if (position_of(g) < position) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                k[g][step] = keys[position_of(g) * VECTORS + step * 4 + q];
            }
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                v[g][i] = values[position_of(g) * VECTORS + (slice * PARTS + i) * 4 + q];
            }
        }
    }
    uint2 x[3];
    receive_qkv<1>(x, arguments, layer, token, position, head, warp == 0, epoch);
    const auto [query, new_key, new_value] = x;

    // The query as operand B: its quads 2 n and 2 n + 1 are in the lanes of the same numbers, two pairs each.
    const u32 other = __shfl_xor_sync(~0u, lane % 2 ? query.x : query.y, 1);
    const uint2 quad = {lane % 2 ? other : query.x, lane % 2 ? query.y : other};
    uint2 b[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const int source = step * 8 + q * 2 + r % 2;
        b[step] = {__shfl_sync(~0u, quad.x, source), __shfl_sync(~0u, quad.y, source)};
    }

    float score[FEW_GROUPS];
    float best = LOWEST_SCORE;
#pragma unroll
    for (int g = 0; g < FEW_GROUPS; ++g) {
        float d[2][4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            multiply_add(d[step % 2], k[g][step], b[step]);
        }
        const float product = d[0][0] + d[1][0] + (d[0][3] + d[1][3]);
        score[g] = position_of(g) < position ? product * rsqrtf(HEAD_DIM) : LOWEST_SCORE;
        best = fmaxf(best, score[g]);
    }
    const float new_score = warp_sum(dot(unpack(query), unpack(new_key))) * rsqrtf(HEAD_DIM);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
        best = fmaxf(best, __shfl_xor_sync(~0u, best, distance));
    }
    float weight = 0;
    float sums[PARTS][8] = {};
#pragma unroll
    for (int g = 0; g < FEW_GROUPS; ++g) {
        const float of_position = position_of(g) < position ? expf(score[g] - best) : 0;
        weight += of_position;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                sums[i][j] += of_position * unpack(v[g][i]).v[j];
            }
        }
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
        weight += __shfl_xor_sync(~0u, weight, distance);
    }
    float *head_sum = shared().head_sum[warp][0][0].v;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        head_sum[i * 32 + q * 8 + r] = sum_over_groups(sums[i]);
    }
    if (lane == 0) {
        shared().head_max[warp][0] = best;
        shared().head_weight[warp][0] = weight;
    }

    // Merge the warps and the new position: thread t has dimension t of the slice.
    const int dimension = slice * DIMENSIONS + threadIdx.x % DIMENSIONS;
    const u32 low = __shfl_sync(~0u, new_value.x, dimension / 4);
    const u32 high = __shfl_sync(~0u, new_value.y, dimension / 4);
    const u32 pair = dimension / 2 % 2 ? high : low;
    sync_consumers();
    if (threadIdx.x >= DIMENSIONS) {
        return;
    }
    const PartialAttention merged = merge_attention(WARPS + 1, [&](int w) -> PartialAttention {
        if (w == WARPS) {
            return {new_score, 1, dimension % 2 ? high_half(pair) : low_half(pair)};
        }
        return {shared().head_max[w][0], shared().head_weight[w][0],
                shared().head_sum[w][0][threadIdx.x / 4].v[threadIdx.x % 4]};
    });
    publish_element(arguments.exchange, &Activations::attention, token, head * HEAD_DIM + dimension,
                    merged.sum / merged.weight, epoch);
}

// Attention to any number of positions. Block b of a row takes the query heads of group b % GROUPS, and split
// b / GROUPS of the positions:
//     warp w of split s:  positions 8 s + w, 8 s + w + POSITION_STRIDE, 8 s + w + 2 * POSITION_STRIDE, ...
//     lane l:             dimensions 4 l .. 4 l + 3
// Softmax is online (as in FlashAttention): each warp keeps a maximum, a sum of weights and a weighted sum of
// values. The warps are merged here, the splits in merge_splits.
__device__ void attend(const Arguments &arguments, const Layer &layer, int token, int position, u32 epoch) {
    const int row = row_to_attend();
    const int split = blockIdx.x / GROUPS % SPLITS;
    const int first_head = blockIdx.x % GROUPS * GROUP_HEADS;
    const int kv_head = first_head / 2;
    const int warp = warp_index();
    const int lane = lane_index();
    const int first_position = split * WARPS + warp;

    // This lane's quad of a cached position.
    const auto quad_of_row = [&](int cached_position) {
        return place_in_cache(arguments, kv_head, cached_position) * (HEAD_DIM / 4) + lane;
    };

    // Issue all loads that do not depend on this layer's q, k, v before waiting for those.
    uint2 k[KV_PREFETCH] = {};
    uint2 v[KV_PREFETCH] = {};
    const auto prefetch = [&](int i, int cached_position) {
        if (cached_position < position) {
            k[i] = layer.keys[quad_of_row(cached_position)];
            v[i] = layer.values[quad_of_row(cached_position)];
        }
    };
#pragma unroll
    for (int i = 0; i < KV_PREFETCH; ++i) {
        prefetch(i, first_position + i * POSITION_STRIDE);
    }
    constexpr int KEY = GROUP_HEADS;
    constexpr int VALUE = GROUP_HEADS + 1;
    uint2 x[GROUP_HEADS + 2];
    receive_qkv<GROUP_HEADS>(x, arguments, layer, token, position, first_head, first_position == 0, epoch);

    // Start with a dummy key: score LOWEST_SCORE, weight 1, value 0. Any real key scales its weight to 0,
    // here or in a merge. In a split without positions, which has no real key, it avoids 0 / 0.
    Quad sum[GROUP_HEADS] = {};
    float best[GROUP_HEADS];
    float weight[GROUP_HEADS];
#pragma unroll
    for (int h = 0; h < GROUP_HEADS; ++h) {
        best[h] = LOWEST_SCORE;
        weight[h] = 1;
    }
    for (int next = first_position; next <= position; next += KV_PREFETCH * POSITION_STRIDE) {
#pragma unroll
        for (int i = 0; i < KV_PREFETCH; ++i) {
            const int this_position = next + i * POSITION_STRIDE;
            if (i % 2 == 0 && this_position > position) {
                break;                                // checked once for two positions, whose sums overlap
            }
            if (this_position == position) {
                k[i] = x[KEY];
                v[i] = x[VALUE];
            }
#pragma unroll
            for (int h = 0; h < GROUP_HEADS; ++h) {
                const float product = warp_sum(dot(unpack(x[h]), unpack(k[i])));
                const float score = this_position <= position ? product * rsqrtf(HEAD_DIM) : LOWEST_SCORE;
                const float new_best = fmaxf(best[h], score);
                const float rescale = expf(best[h] - new_best);
                const float new_weight = expf(score - new_best);
                best[h] = new_best;
                weight[h] = weight[h] * rescale + new_weight;
#pragma unroll
                for (int d = 0; d < 4; ++d) {
                    sum[h].v[d] = sum[h].v[d] * rescale + new_weight * unpack(v[i]).v[d];
                }
            }
            prefetch(i, this_position + KV_PREFETCH * POSITION_STRIDE);
        }
    }

    // Merge the warps: thread t has dimension t % 128 of query head t / 128 of the group.
#pragma unroll
    for (int h = 0; h < GROUP_HEADS; ++h) {
        shared().head_sum[warp][h][lane] = sum[h];
    }
    if (lane == 0) {
#pragma unroll
        for (int h = 0; h < GROUP_HEADS; ++h) {
            shared().head_max[warp][h] = best[h];
            shared().head_weight[warp][h] = weight[h];
        }
    }
    sync_consumers();
    const int h = threadIdx.x / HEAD_DIM;
    if (h >= GROUP_HEADS) {
        return;
    }
    const int dimension = threadIdx.x % HEAD_DIM;
    const int head = first_head + h;
    const PartialAttention merged = merge_attention(WARPS, [&](int w) -> PartialAttention {
        return {shared().head_max[w][h], shared().head_weight[w][h],
                shared().head_sum[w][h][dimension / 4].v[dimension % 4]};
    });
    const float output = merged.sum / merged.weight;
    const float log_sum = merged.best + logf(merged.weight);

    if (SPLITS == 1) {
        const int element = head * HEAD_DIM + dimension;
        publish_element(arguments.exchange, &Activations::attention, token, element, output, epoch);
        return;
    }
    // Each as two bfloat16, value and remainder: 16 bits of precision, so splitting adds no relevant rounding
    // error. Only one thread reads them, so one replica is enough.
    const float output_rest = output - round_to_bf16(output);
    const float log_sum_rest = log_sum - round_to_bf16(log_sum);
    const float parts[4] = {output, output_rest, log_sum, log_sum_rest};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        publish<1>(&arguments.exchange->splits[row][head][split][dimension][i], parts[i], epoch);
    }
}

// Output o = (row * HEADS + head) * 128 + dimension is merged by SPLITS adjacent lanes, one per split:
//     o = (256 * block + thread) / SPLITS,  split = thread % SPLITS
__device__ void merge_splits(Exchange &exchange, u32 epoch) {
    const int output = (blockIdx.x * CONSUMERS + threadIdx.x) / SPLITS;
    const int row = output / QUERY_SIZE;
    const int dimension = output % QUERY_SIZE;        // of all heads
    const int split = threadIdx.x % SPLITS;
    uint2 parts[1];
    const u32 *source = exchange.splits[row][dimension / HEAD_DIM][split][dimension % HEAD_DIM];
    receive(parts, epoch, [&](int) { return source; });
    const float value = low_half(parts[0].x) + high_half(parts[0].x);
    const float log_sum = low_half(parts[0].y) + high_half(parts[0].y);

    const float best = warp_max<SPLITS>(log_sum);
    const float weight = expf(log_sum - best);
    const float merged = warp_sum<SPLITS>(weight * value) / warp_sum<SPLITS>(weight);
    if (split == 0) {
        publish_element(&exchange, &Activations::attention, row, dimension, merged, epoch);
    }
}


// ---- Layers

// A pass: POSITIONS consecutive tokens of each row through all layers. input_of(token) points to (HIDDEN). `position`
// is that of the first token of the row that this block attends for. Loads that do not depend on other blocks are
// issued before the spin loops that do.
template <int POSITIONS, class InputOf>
__device__ void run_layers(const Arguments &arguments, InputOf input_of, int position, Cursor &cursor,
                           u32 &epoch) {
    Exchange *exchange = arguments.exchange;
    const Exchange &replica = replica_of_this_block(exchange);
    constexpr int TOKENS = POSITIONS * ROWS;
    Vector<TOKENS, HIDDEN> norm_weight;
    Vectors<TOKENS, HIDDEN> x;
    Vectors<TOKENS, QUERY_SIZE> attention;
    Vectors<TOKENS, PANEL_COLUMNS> inner;

    // A thread that publishes a value of the residual stream keeps it in a register.
    const int residual_row = share_of_this_block(HIDDEN).first_row + threadIdx.x % MAX_ROWS<HIDDEN>;
    const int residual_token = threadIdx.x / MAX_ROWS<HIDDEN> % TOKENS;
    float residual = low_half(input_of(residual_token)[min(residual_row, HIDDEN - 1)]);
    const auto add_residual = [&](float sum) {
        residual = round_to_bf16(residual + sum);
        return residual;
    };

#pragma unroll
    for (int group = 0; group < groups_of(TOKENS); ++group) {
        load_vector<TOKENS>(x[group], (const u32 *)input_of(token_of_lane(group, TOKENS)));
    }
#pragma unroll 1
    for (const Layer *layer = arguments.layers; layer < arguments.layers + LAYERS; ++layer) {
        // Phase 1: input norm; q, k, v
        load_vector<TOKENS>(norm_weight, layer->input_norm);
        Weights<TOKENS, QKV_SIZE, HIDDEN> qkv;
        load_ahead(qkv, cursor);
        if (layer > arguments.layers) {
            receive_vectors<TOKENS>(x, replica, &Activations::hidden, epoch);
        }
        rms_norm<TOKENS>(x, norm_weight);
        ++epoch;
        matvec(qkv, x, cursor, 0);
        for_each_row<QKV_SIZE, TOKENS>(0, [&](int token, int row, float sum) {
            publish(&exchange->tokens[0][token].qkv[row], sum, epoch);
        });

        // Phases 2 and 3: attention
        if (blockIdx.x < ATTENTION_BLOCKS) {
#pragma unroll 1
            for (int i = 0; i < POSITIONS; ++i) {
                if (i > 0) {
                    sync_consumers();                 // previous position is cached, head_sum has been read
                }
                const int token = i * ROWS + row_to_attend();
                if (HEAD_SLICES > 0 && position + i <= FEW_POSITIONS) {
                    attend_to_few(arguments, *layer, token, position + i, epoch);
                } else {
                    attend(arguments, *layer, token, position + i, epoch);
                }
            }
        }
        const bool has_splits = SPLITS > 1 && position > FEW_POSITIONS;
        if (has_splits && (ATTENTION_BLOCKS == GRID || blockIdx.x < ATTENTION_BLOCKS)) {
            merge_splits(*exchange, epoch);
        }

        // Phase 4: o_proj and residual
        Weights<TOKENS, HIDDEN, QUERY_SIZE> o;
        load_ahead(o, cursor);
        receive_vectors<TOKENS>(attention, replica, &Activations::attention, epoch);
        matvec(o, attention, cursor, SECOND_REGION);
        for_each_row<HIDDEN, TOKENS>(SECOND_REGION, [&](int token, int row, float sum) {
            publish_element(exchange, &Activations::post_attention, token, row, add_residual(sum), epoch);
        });

        // Phase 5: post-attention norm; gate and up, silu(gate) * up
        load_vector<TOKENS>(norm_weight, layer->post_norm);
        using Gate = Weights<TOKENS, INNER, HIDDEN>;
        constexpr bool IS_GATE_AHEAD = Gate::AHEAD == Gate::MAX * Gate::PARTS;               // the whole matrix
        Gate gate;
        Weights<TOKENS, INNER, HIDDEN, IS_GATE_AHEAD ? REGISTER_STAGES<TOKENS> - Gate::AHEAD : 0> up;
        load_ahead(gate, cursor);
        load_ahead(up, cursor);
        receive_vectors<TOKENS>(x, replica, &Activations::post_attention, epoch);
        rms_norm<TOKENS>(x, norm_weight);
        matvec(gate, x, cursor, 0);
        matvec(up, x, cursor, MAX_ROWS<INNER>);
        for_each_row<INNER, TOKENS>(0, [&](int token, int row, float gate) {
            const float activated = round_to_bf16(silu(gate));
            const float up = row_sum(token, MAX_ROWS<INNER> + row - share_of_this_block(INNER).first_row);
            publish_element(exchange, &Activations::inner, token, row, activated * up, epoch);
        });

        // Phase 6: down_proj and residual
#pragma unroll
        for (int column = 0; column < INNER; column += PANEL_COLUMNS) {
            Weights<TOKENS, HIDDEN, PANEL_COLUMNS> down;
            load_ahead(down, cursor);
            receive_vectors<TOKENS>(inner, replica, &Activations::inner, epoch, 0, column);
            matvec(down, inner, cursor, SECOND_REGION, column > 0);
        }
        for_each_row<HIDDEN, TOKENS>(SECOND_REGION, [&](int token, int row, float sum) {
            publish_element(exchange, &Activations::hidden, token, row, add_residual(sum), epoch);
        });
        if (PACKED) {
            __threadfence();                          // order the emptying in this layer before values of the next
        }
    }
}


// ---- Sampling

// Score i of a thread belongs to token  i / 4 * 1024 + thread * 4 + i % 4.
__device__ int token_of_score(int i) {
    return i / 4 * 4 * CONSUMERS + threadIdx.x * 4 + i % 4;
}

// After the layers: the final norm of each row's last token, into x, and the logits of a head. `first_token` is the
// first of these tokens in the pass.
__device__ void run_head(const Arguments &arguments, int first_token, int head, Vectors<ROWS, HIDDEN> &x,
                         Cursor &cursor, u32 epoch) {
    Vector<ROWS, HIDDEN> norm_weight;
    load_vector<ROWS>(norm_weight, arguments.final_norm);
    Weights<ROWS, VOCAB, HIDDEN> weights;
    load_ahead(weights, cursor);
    const Exchange &replica = replica_of_this_block(arguments.exchange);
    receive_vectors<ROWS>(x, replica, &Activations::hidden, epoch, first_token);
    rms_norm<ROWS>(x, norm_weight);
    matvec(weights, x, cursor, 0);
    for_each_row<VOCAB, ROWS>(0, [&](int row, int code, float sum) {
        publish<LOGITS_COPIES>(&arguments.exchange->logits[row][head][code], sum, epoch);
    });
}

// Chooses the token of one row. Everything that does not depend on the logits is loaded before waiting for them.
__device__ int sample(const Arguments &arguments, int row, int head, u32 frame, u32 epoch) {
    constexpr int N = SCORES_PER_THREAD;
    const Sampling sampling = {arguments.temperature[row], arguments.topk_rank[row],
                               arguments.one_minus_top_p[row]};
    const bool is_greedy = arguments.greedy[row];
    float noise[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        noise[i] = arguments.noise[(row * CODES + head) * VOCAB + token_of_score(i)];
        noise[i] = is_greedy ? 1 : noise[i];
    }
#if CODES == 1
    const float penalty = arguments.repetition_penalty[row];
    const u64 end_token = arguments.end_token[row];
    const bool is_early = frame < arguments.min_tokens[row];
    bool is_seen[N];
    bool is_suppressed[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u32 place = row * VOCAB + token_of_score(i);
        is_seen[i] = arguments.seen[place];
        is_suppressed[i] = arguments.suppressed[place] || (is_early && token_of_score(i) == end_token);
    }
#endif
    uint2 logits[N / 4];
    const Exchange *exchange = arguments.exchange;
    const Exchange &replica = LOGITS_COPIES == 1 ? *exchange : replica_of_this_block(exchange);
    const u32 *first = replica.logits[row][head];
    receive(logits, epoch, [&](int i) { return first + token_of_score(4 * i); });
    float score[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        score[i] = unpack(logits[i / 4]).v[i % 4];
#if CODES == 1
        score[i] = apply_rules(score[i], is_seen[i], penalty, is_suppressed[i]);
#endif
    }
    constexpr int SCORE_BITS = IS_TALKER ? 32 : 16;   // the predictor has no penalty: its scores are bfloat16
    return sample_scores<SCORE_BITS>(score, noise, sampling, shared().sampler, token_of_score,
                                     [] { sync_consumers(); });
}


// The predictor's choices: codes of one row after the other, 16 bits each. With a single row every block
// computes the choice, with the same result; with more, one of the first blocks chooses for each row and sends
// the code to all blocks.
struct Codes {
    u64 of_four[groups_of(ROWS)];

    __device__ u64 operator[](u32 row) const {
        u64 four = of_four[0];
#pragma unroll
        for (int group = 1; group < groups_of(ROWS); ++group) {             // registers cannot be indexed
            four = row / 4 == group ? of_four[group] : four;
        }
        return four >> 16 * (row % 4) & 0xffff;
    }
};

__device__ Codes choose_codes(const Arguments &arguments, int head, u32 epoch) {
    if (ROWS == 1) {
        return {(u64)sample(arguments, 0, head, 0, epoch)};
    }
    if (blockIdx.x < CODE_SLOTS) {
        const u32 code = sample(arguments, blockIdx.x % ROWS, head, 0, epoch);
        if (threadIdx.x == 0) {
            publish_bits(&arguments.exchange->codes[blockIdx.x], code, epoch);
        }
    }
    uint2 quads[CODE_SLOTS / 4];
    const u32 *first = replica_of_this_block(arguments.exchange).codes;
    receive(quads, epoch, [&](int i) { return first + 4 * i; });
    Codes codes;
#pragma unroll
    for (int i = 0; i < CODE_SLOTS / 4; ++i) {
        codes.of_four[i] = (u64)quads[i].y << 32 | quads[i].x;
    }
    return codes;
}


// ---- The kernel: GRID blocks of CONSUMERS + PRODUCERS threads, with SHARED_BYTES of dynamic shared memory

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
decode_step(const __grid_constant__ Arguments arguments) {
    if (threadIdx.x < STAGES) {
        init_barrier(ring_slot(threadIdx.x));
    }
    if (threadIdx.x == 0) {
        set_deadline(arguments.failed, arguments.failed_on_host);
    }
#if BULK_COPIES
    fence_proxy_async();
#endif
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        produce_weights(arguments.matrices, threadIdx.x - CONSUMERS);
        return;
    }

    Vectors<ROWS, HIDDEN> x;
    Cursor cursor;
    u32 epoch = *arguments.epoch;

#if CODES == 1  // the talker: a token of each row, then the first code of the next frame
    const int attended = row_to_attend();
    const u64 next_position = arguments.prompt_length[attended] + arguments.frame[attended];
    const auto input_of = [&](int token) {
        return arguments.embedding + token * HIDDEN;
    };
    // A row whose cache is full does not advance, but is still computed with the others.
    run_layers<1>(arguments, input_of, min(next_position, arguments.cache_length - 1), cursor, epoch);
    run_head(arguments, 0, 0, x, cursor, epoch);

    // The first blocks choose and write, one for each row.
    const int row = blockIdx.x;
    if (row >= ROWS) {
        return;
    }
    const u64 frame = arguments.frame[row] + 1;
    const u64 token = sample(arguments, row, 0, frame, epoch);
#pragma unroll
    for (int group = 0; group < groups_of(ROWS); ++group) {
        if (arguments.advance[row] && token_of_lane(group, ROWS) == row) {                   // holds its vector
#pragma unroll
            for (int i = 0; i < HIDDEN / STAGE_COLUMNS * QUADS_PER_PART<ROWS>; ++i) {
                u32 *pairs = arguments.hidden + row * (HIDDEN / 2) + first_pair(quad_of_vector<ROWS>(i));
                pairs[0] = x[group][i].x;
                pairs[2] = x[group][i].y;
            }
        }
    }
    if (threadIdx.x > 0) {
        return;
    }
    if (row == 0) {
        *arguments.epoch = epoch;
    }
    if (!arguments.advance[row]) {
        return;
    }
    arguments.token[row] = token;
    arguments.frame[row] = frame;
    arguments.seen[row * VOCAB + token] = true;
    if (token == arguments.end_token[row]) {
        arguments.ended[row] = true;
    }

#else  // the predictor: its inputs are the talker's hidden state, the first code, then each code that it chooses
    const int element = blockIdx.x * CONSUMERS + threadIdx.x;                // of the next embeddings
    const int element_row = element / TALKER_HIDDEN;
    float sum = 0;

    Codes codes = {};                                 // the latest of each row
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        codes.of_four[row / 4] |= arguments.token[row] << 16 * (row % 4);
    }
    // The tables in which the latest codes are looked up. Their addresses are loaded before the codes are known.
    const bf16 *inputs = arguments.code_inputs[0];
    const bf16 *embeddings = arguments.code_embeddings[0];
    const auto record_codes = [&](int position) {
        if (element_row < ROWS) {
            sum += low_half(embeddings[codes[element_row] * TALKER_HIDDEN + element % TALKER_HIDDEN]);
        }
        if (element < ROWS) {
            const u64 place = element * arguments.frames + arguments.frame[element];
            arguments.codes[place * (CODES + 1) + position] = codes[element];
        }
    };
    const auto inputs_from = [&](int first_position) {
        return [&, first_position](int token) {
            const int position = first_position + token / ROWS;
            const int row = token % ROWS;
            return position == 0 ? arguments.first_input + row * HIDDEN
                                 : inputs + codes[row] * HIDDEN;
        };
    };
    record_codes(0);
    run_layers<FIRST_POSITIONS>(arguments, inputs_from(0), 0, cursor, epoch);
#pragma unroll 1
    for (int position = 1; position <= CODES; ++position) {
        if (position >= FIRST_POSITIONS) {
            run_layers<1>(arguments, inputs_from(position), position, cursor, epoch);
        }
        run_head(arguments, position < FIRST_POSITIONS ? MAX_TOKENS - ROWS : 0, position - 1, x, cursor, epoch);
        inputs = arguments.code_inputs[position];
        embeddings = arguments.code_embeddings[position];
        codes = choose_codes(arguments, position - 1, epoch);
        record_codes(position);
    }
    if (element == 0) {
        *arguments.epoch = epoch;
    }
    if (element_row >= ROWS) {
        return;
    }
    const u64 frame = element_row * arguments.frames + arguments.frame[element_row];
    const u64 place = frame * TALKER_HIDDEN + element % TALKER_HIDDEN;       // in `text`
    arguments.embedding[element] = pack_bf16x2(round_to_bf16(sum) + low_half(arguments.text[place]), 0);
#endif
}
