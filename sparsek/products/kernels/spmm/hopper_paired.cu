/* C = act(alpha * (A @ B) + bias[:, None]) on Hopper, where A is block-sparse with blocks of 16, 32 or 64 rows. Two
   CTAs share what they read of B.

       tiles of C of a cluster                            what one step, a block column, brings into shared memory
       .--------- 256 ---------.--------- 256 --------.
       |     warpgroup 0       |     warpgroup 1      |   CTA 0: A [64, BK], and for each warpgroup B [BK, 256]
       '----------------------------------------------'
       |     warpgroup 0       |     warpgroup 1      |   CTA 1: the same
       '----------------------------------------------'

   A tile has JOINED block rows, from anywhere in A: those that have many block columns in common (pairs.py). So have
   the tiles of a cluster. Where both CTAs need the same rows of B in the same step, each loads those of one warpgroup,
   and multicasts them to both. A cluster stays on its SMs and walks tiles. In each CTA two warps fill the ring of B
   by TMA (`load_b`), and a third that of A by cp.async (`load_a`), which also writes zeros for what a joined block
   row lacks; two consumer warpgroups multiply out of both (`multiply`).

   Bottleneck (docs/notes/products-paired.md): what TMA writes to shared memory, in lines of 128 bytes. Small boxes of A cost it
   more than their bytes, so A does not come by TMA.

   Capital names that are not defined here are constants of the compilation: Config.defines in hopper_paired.py, which
   also describes what a call must be. Sums are float32. NVRTC compiles this file with hopper_ptx.cu in it. */

#define PTX __device__ __forceinline__
typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;

struct alignas(64) TensorMap { u64 opaque[16]; };

struct Params {
  const int* tiles;   // 4 numbers a tile: first step, end step, pair of units, column of C
  const int* starts;  // cluster p computes tiles[starts[p]:starts[p+1]]
  const int* rows;    // [pairs][2][JOINED]: rows of C; outside C for none
  const int* steps;   // [2][count][ENTRY]: block column, or its complement where both CTAs need it; stored blocks of A
  const void* values; // [nnzb, BM, BK]: A
  const void* bias;   // [m] in C's dtype
  int count;          // steps, with a warp's spare ones
  int nnzb;           // stored blocks; this number in `steps` is a block of zeros
  int m;
  float alpha;
};

constexpr int WGS = 2, THREADS = 128 * (WGS + 1);
// A step is computed in slices of KS columns of A: as many slots of B as fit are smaller then. Where B is [N, K], a
// slice is a whole block column, because its lines are longer then.
constexpr int KS = B_ROW && BK > 32 ? 32 : BK, SLICES = BK / KS;
constexpr int PITCH = 2 * KS;                                  // bytes of a row of A, of a column of B in [N, K]
constexpr int TN = 512, HALF_N = TN / 2;                       // columns of a tile, of a warpgroup
constexpr int A_BYTES = 64 * PITCH, B_BYTES = HALF_N * PITCH;  // of a slot
constexpr int A_STAGES = STAGES / 2 + 2;                       // a slice takes one slot of A and two of B
constexpr int PIECES = PITCH / 16;     // of 16 bytes, in a row of A
constexpr int ENTRY = JOINED == 1 ? 2 : JOINED == 2 ? 4 : 8;                   // numbers of a step in `steps`
constexpr int BOX_N = 64, BOX_BYTES = 64 * BOX_N * 2, BOXES = HALF_N / BOX_N;  // of C
constexpr int PART_BYTES = BOX_BYTES * BM / 64;                                // a block row's part of a box
constexpr int B_AT = 0, A_AT = B_AT + STAGES * B_BYTES, C_AT = A_AT + A_STAGES * A_BYTES;
constexpr int FULL_AT = C_AT + WGS * C_BOXES * BOX_BYTES, EMPTY_AT = FULL_AT + STAGES * 8;
constexpr int A_FULL_AT = EMPTY_AT + STAGES * 8, A_EMPTY_AT = A_FULL_AT + A_STAGES * 8;
static_assert(A_EMPTY_AT + A_STAGES * 8 <= SMEM_BYTES, "hopper_paired.py counts shared memory differently");
static_assert(STAGES >= 4, "a warpgroup frees a slot when its next one has landed");
static_assert(STAGES % 2 == 0, "a slot that served both warpgroups in turns could pass two phases behind one of them");
static_assert(JOINED * BM <= 64 && 64 % BK == 0 && BOXES % C_BOXES == 0 && A_BYTES % 1024 == 0, "");

#include "hopper_ptx.cu"

// ---------------------------------------------------------------------------------------------------- PTX wrappers

// Copies 16 bytes, or writes 16 zeros.
PTX void copy_or_zero(u32 to, const void* from, bool copied) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copied ? 16 : 0) : "memory");
}

// Arrives at the barrier at `at` once all copies of this thread have landed.
PTX void copies_arrive(u32 at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}

// Rows of B under a slice: [KS, 256] as four panels of 64 columns, or [256, KS]. With `shared` to the same
// address in both CTAs; each CTA's own barrier counts the bytes.
PTX void tma_load_b(u32 to, const TensorMap& map, u32 landed, int k, int col, bool shared) {
#if B_ROW
#define WHERE "[%1, {%2, %3, %4}], [%5]"
#define COORDINATES "r"(0), "r"(k), "r"(col / 64)
#define RANK ".3d"
#else
#define WHERE "[%1, {%2, %3}], [%5]"
#define COORDINATES "r"(k), "r"(col), "r"(0)
#define RANK ".2d"
#endif
  if (shared)
    asm volatile("cp.async.bulk.tensor" RANK
                 ".shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], " WHERE ", %6;"
                 ::"r"(to), "l"(&map), COORDINATES, "r"(landed), "h"((u16)3) : "memory");
  else
    asm volatile("cp.async.bulk.tensor" RANK ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], " WHERE ";"
                 ::"r"(to), "l"(&map), COORDINATES, "r"(landed) : "memory");
}

#if HALF
#define TYPE "f16.f16"
#else
#define TYPE "bf16.bf16"
#endif

// d[64, 256] += A[64, 16] @ B[16, 256].
PTX void wgmma(float (&d)[128], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE " {" NAMES_256 "}, %128, %129, 1, 1, 1, 0, %130;"
               : SUMS_256(d) : "l"(a), "l"(b), "n"(B_ROW));
}

// The producer's warpgroup releases registers, a consumer takes them.
PTX void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 56;"); }
PTX void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 224;"); }

// ---------------------------------------------------------------------------------------------------- tiles and roles

constexpr u64 A_DESC = described(8 * PITCH, 16, PITCH);
constexpr u64 B_DESC = B_ROW ? described(1024, KS * 128, 128) : described(8 * PITCH, 16, PITCH);

struct Tile { int first, end, pair, col; };
PTX Tile tile_at(const Params& p, int t) {
  const int4 record = ((const int4*)p.tiles)[t];
  return {record.x, record.y, record.z, record.w};
}

struct Step { int col, block[JOINED]; };
PTX Step step_at(const Params& p, int rank, int i) {
  const int* at = p.steps + ((i64)rank * p.count + i) * ENTRY;
  Step step;
  if constexpr (JOINED == 1) {
    const int2 x = *(const int2*)at;
    step.col = x.x, step.block[0] = x.y;
  } else {
    const int4 x = *(const int4*)at;
    step.col = x.x, step.block[0] = x.y, step.block[1] = x.z;
    if constexpr (JOINED == 4) step.block[2] = x.w, step.block[3] = at[4];
  }
  return step;
}

// Where a role is in the ring of B, in slots, and in that of A, in slices.
struct Ring {
  u32 smem, phase, a_phase;
  u32 slot = 0, a_slot = 0;

  PTX u32 full() const { return smem + FULL_AT + slot * 8; }
  PTX u32 empty() const { return smem + EMPTY_AT + slot * 8; }
  PTX u32 b() const { return smem + B_AT + slot * B_BYTES; }
  PTX void next(int slots) { slot += slots; if (slot >= STAGES) slot -= STAGES, phase ^= 1; }

  PTX u32 a_full() const { return smem + A_FULL_AT + a_slot * 8; }
  PTX u32 a_empty() const { return smem + A_EMPTY_AT + a_slot * 8; }
  PTX u32 a() const { return smem + A_AT + a_slot * A_BYTES; }
  PTX void next_slice() { if (++a_slot == A_STAGES) a_slot = 0, a_phase ^= 1; }
};

// Calls `slice(steps, i, col, at)` for each slice of the CTA's tiles in order: `steps` holds 32 steps, one a lane, of
// which this is step i; the slice begins `at` columns into its block column; the tile begins at column `col` of C. The
// whole warp loads the next 32 steps meanwhile: their latency is that of several steps of narrow blocks.
template <class Slice> PTX void walk(const Params& p, int rank, int lane, const Slice& slice) {
  const int begin = p.starts[blockIdx.x / CLUSTER], last = p.starts[blockIdx.x / CLUSTER + 1];
  Tile tile = tile_at(p, begin), next_tile = tile_at(p, min(begin + 1, last));  // the list ends with a spare one
  Step coming = step_at(p, rank, tile.first + lane);
  for (int t = begin; t < last; t++) {
    const Tile then = tile_at(p, min(t + 2, last));
    if (tile.first == tile.end) coming = step_at(p, rank, next_tile.first + lane);
    for (int first = tile.first; first < tile.end; first += 32) {
      const Step steps = coming;
      coming = step_at(p, rank, (first + 32 < tile.end ? first + 32 : next_tile.first) + lane);
      const int count = min(32, tile.end - first);
      for (int i = 0; i < count; i++)
#pragma unroll
        for (int at = 0; at < BK; at += KS) slice(steps, i, tile.col, at);
    }
    tile = next_tile, next_tile = then;
  }
}

// The producer warp of warpgroup `wg`'s columns of B. Every second slot is theirs.
PTX void load_b(const TensorMap& map, const Params& p, u32 smem, int wg, int rank, int lane) {
  Ring ring{smem, 1, 1, (u32)wg};  // a fresh barrier passes for parity 1: every slot begins empty
  walk(p, rank, lane, [&](const Step& steps, int i, int tile_col, int at) {
    const int col = __shfl_sync(~0u, steps.col, i);
    const bool shared = col < 0;
    const int k = (shared ? ~col : col) * BK + at;
    if (elected()) {
      // Wait until these warpgroups of both CTAs have multiplied the slot's contents: B may go to both.
      barrier_wait(ring.empty(), ring.phase);
      barrier_expect(ring.full(), B_BYTES);  // also where the other CTA loads them
      if (!shared || wg == rank) tma_load_b(ring.b(), map, ring.full(), k, tile_col + wg * HALF_N, shared);
    }
    ring.next(2);
  });
}

// The producer warp of A. A lane copies 16 bytes of every 512; the swizzle is that of A_DESC.
PTX void load_a(const Params& p, u32 smem, int rank, int lane) {
  Ring ring{smem, 1, 1};
  constexpr int ROWS = 32 / PIECES;  // of A that the warp copies at once
  const int piece = lane % PIECES, line = lane / PIECES;
  walk(p, rank, lane, [&](const Step& steps, int i, int, int at) {
    int blocks[JOINED];
#pragma unroll
    for (int j = 0; j < JOINED; j++) blocks[j] = __shfl_sync(~0u, steps.block[j], i);
    barrier_wait(ring.a_empty(), ring.a_phase);  // until both warpgroups have multiplied the slot's contents
#pragma unroll
    for (int first = 0; first < JOINED * BM; first += ROWS) {
      const int row = first + line, block = blocks[first / BM];
      const int turned = PITCH == 128 ? row & 7 : PITCH == 64 ? row / 2 & 3 : row / 4 & 1;
      const bool stored = block < p.nnzb;
      const u16* from = (const u16*)p.values + (stored ? (i64)block * (BM * BK) : 0) + row % BM * BK + at + piece * 8;
      copy_or_zero(ring.a() + row * PITCH + ((piece ^ turned) << 4), from, stored);
    }
    copies_arrive(ring.a_full());
    ring.next_slice();
  });
}

// The affine part of the epilogue for a thread's two rows of the warp's 16: times alpha, plus `shift`. `row` is the
// first of the warp's block row.
struct Shift { float of[2]; };
PTX Shift shift_of(const Params& p, int row, int warp, int lane) {
  Shift shift;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int line = 16 * warp + 8 * h + lane / 4, y = row + line % BM;
    shift.of[h] = BIAS && y < p.m ? widen(((const u16*)p.bias)[y]) : 0.f;
  }
  return shift;
}

// act(alpha * e + shift) of a thread's part of 16 columns: e[0] and e[1] of its first row, the next two of the other.
PTX void finish(float* e, const Params& p, const Shift& shift) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if constexpr (BIAS || HAS_ALPHA) e[i] = fmaf(e[i], HAS_ALPHA ? p.alpha : 1.f, shift.of[i / 2 % 2]);
    e[i] = activated(e[i]);
  }
}

// The address in a box of 64 x 64, as TMA swizzles it, of the row that this lane passes to `store_matrix`: of the four
// 8 x 8 matrices in the warp's 16 rows and 16 columns from 8j on. With C_COL a box is a part [64, BM] for each block
// row.
PTX u32 in_box(int j, int warp, int lane) {
  const int down = (lane / 8) % 2, across = lane / 16;
  if constexpr (C_COL) {
    const int line = 8 * (j + across) + lane % 8, piece = (2 * warp + down) % (BM / 8);
    const int turned = BM == 64 ? line & 7 : BM == 32 ? line / 2 & 3 : line / 4 & 1;
    return 16 * warp / BM * PART_BYTES + line * (2 * BM) + ((piece ^ turned) << 4);
  }
  const int line = 16 * warp + 8 * down + lane % 8;
  return line * 128 + (((j + across) ^ (line & 7)) << 4);
}

// Lane 0 and 1 of a warp free a slot of B in CTA 0 and 1, lane 2 one of A in its own CTA.
PTX void release(u32 b_empty, u32 a_empty, int lane, int rank) {
  barrier_arrive(lane < CLUSTER ? b_empty : a_empty, lane < CLUSTER ? lane : rank);
}

// Consumer warpgroup `wg`: its 256 columns of every tile. Every second slot of B is its own.
PTX void multiply(const TensorMap& c_map, const Params& p, u32 smem, int wg, int rank) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4, lane = threadIdx.x % 32;
  const bool leader = threadIdx.x % 128 == 0;
  const u32 stage = smem + C_AT + wg * (C_BOXES * BOX_BYTES);
  const int begin = p.starts[blockIdx.x / CLUSTER], last = p.starts[blockIdx.x / CLUSTER + 1];
  Ring ring{smem, 0, 0, (u32)wg};
  u32 before = 0, a_before = 0;  // barriers of the slots that the previous slice read
  Tile next_tile = tile_at(p, begin);
#pragma unroll 1
  for (int t = begin; t < last; t++) {
    const Tile tile = next_tile;
    next_tile = tile_at(p, t + 1);  // prefetched during a whole tile
    int rows[JOINED];
#pragma unroll
    for (int j = 0; j < JOINED; j++) rows[j] = p.rows[(tile.pair * CLUSTER + rank) * JOINED + j];
    // Of this warp's block row; loaded, because an index into registers would move them to memory.
    const int row = p.rows[(tile.pair * CLUSTER + rank) * JOINED + min(16 * warp / BM, JOINED - 1)];
    const int slices = (tile.end - tile.first) * SLICES;
    float d[128] = {};
#pragma unroll 1
    for (int i = 0; i < slices; i++) {
      const u64 a = A_DESC | place(ring.a()), b = B_DESC | place(ring.b());
      barrier_wait(ring.a_full(), ring.a_phase);  // until the blocks of A have landed
      fence_proxy();                              // copies wrote them; wgmma reads through the async proxy
      barrier_wait(ring.full(), ring.phase);      // until this warpgroup's rows of B have landed
      wgmma_fence();                              // the sums are written before wgmma reads them
#pragma unroll
      for (int k = 0; k < KS / 16; k++) wgmma(d, a + k * 2, b + k * (B_ROW ? 128 : 2));
      wgmma_commit();
      wgmma_wait<1>();  // the previous slice is done: its slots are free; this one's wgmma continue
      if (i > 0 && lane <= CLUSTER) release(before, a_before, lane, rank);
      before = ring.empty(), a_before = ring.a_empty();
      ring.next(2);  // the slot between is the other warpgroup's
      ring.next_slice();
    }
    const Shift shift = shift_of(p, row, warp, lane);  // loaded before the last products are done
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 128; i++) written_until_here(d[i]);
    if (slices > 0 && lane <= CLUSTER) release(before, a_before, lane, rank);
#pragma unroll
    for (int first = 0; first < BOXES; first += C_BOXES) {
      if (leader) tma_store_wait();  // until the previous boxes have been read
      warpgroup_sync(wg);  // all warps wait for that
#pragma unroll
      for (int i = 0; i < C_BOXES; i++)
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          float* e = d + (first + i) * 32 + 4 * j;
          finish(e, p, shift);
          store_matrix(stage + i * BOX_BYTES + in_box(j, warp, lane), round_pair(e[0], e[1]), round_pair(e[2], e[3]),
                       round_pair(e[4], e[5]), round_pair(e[6], e[7]));
        }
      fence_proxy();  // TMA will read what was just written
      warpgroup_sync(wg);  // until all four warps have written
      if (leader) {
#pragma unroll
        for (int i = 0; i < C_BOXES; i++)
#pragma unroll
          for (int j = 0; j < JOINED; j++) {
            const int x = tile.col + wg * HALF_N + (first + i) * BOX_N, y = rows[j];
            tma_store(c_map, stage + i * BOX_BYTES + j * PART_BYTES, C_COL ? y : x, C_COL ? x : y);
          }
        tma_store_commit();
      }
    }
  }
  if (leader) tma_store_wait();  // shared memory must live until the last box is read
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    paired_kernel(const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap c_map,
                  const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = (u32)__cvta_generic_to_shared(shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    if (smem % 1024) __trap();
    for (int i = 0; i < STAGES; i++) {
      barrier_init(smem + FULL_AT + 8 * i, 1);
      barrier_init(smem + EMPTY_AT + 8 * i, 4 * CLUSTER);  // one lane of every warp of a warpgroup of both CTAs
    }
    for (int i = 0; i < A_STAGES; i++) {
      barrier_init(smem + A_FULL_AT + 8 * i, 32);  // every lane of the producer warp
      barrier_init(smem + A_EMPTY_AT + 8 * i, 4 * WGS);  // one lane of every warp of this CTA
    }
    barriers_made();
  }
  cluster_sync();  // until the barriers of both CTAs are initialised
  if (group == 0) {
    give_registers();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (warp < WGS) load_b(b_map, p, smem, warp, rank, lane);
    if (warp == WGS) load_a(p, smem, rank, lane);
    cluster_sync();  // the other CTA may still write here and arrive at barriers here
  } else {
    take_registers();
    multiply(c_map, p, smem, group - 1, rank);
    cluster_sync();
  }
}
