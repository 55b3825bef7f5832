/* C = act(alpha * (A @ B) + bias[:, None]) on Hopper's sparse tensor cores: A is 2:4, B and C are dense. With COMBINE
   another matrix is added, times beta (1), or multiplied with that (2).

       one tile of C                       what one step of BK columns brings into a slot of the ring
       .-------- TN --------.
       |    warpgroup 0     |  64*MS      A       [TM, BK/2]  the stored values of BK columns
       |--------------------|             nibbles [TM, BK/4]  which two of four, in the order that wgmma wants
       |    warpgroup 1     |  64*MS      B       [TN, BK]    or, with B_ROW, [BK, TN]
       '--------------------'
         TM = 64*MS*WGS rows              wgmma.sp: D[64, TN] += A24[64, 32] @ B[32, TN]

   A CTA stays on its SM and walks tiles of C. One producer thread fills the ring by TMA (`load`); WGS consumer
   warpgroups, each with MS slabs of 64 rows, multiply out of it (`multiply`). CLUSTER CTAs take tiles that lie
   below each other: each brings its part of the B that all need, and multicasts it to all. The finished tile leaves
   through shared memory, by TMA.

   With LISTS, A is a stack of stored blocks: tiles come from a list of records and every tile has a list of blocks
   (BSR24). Without it A is one block as large as the matrix.

   The other matrix comes through the ring too: behind a tile's steps, 64 rows in a slot, in the place of B. So it is
   asked for early and needs no memory or barriers of its own. C may lie over it: what is written was read before.

   What bounds it (H200, 8192^3 bf16, docs/notes/two-four.md): power, and reads from L2, 7.2 TB/s without any
   wgmma. So a cluster shares B: CLUSTER 1 has three quarters of the rate of 2.

   With FP8, A and B are e4m3 or e5m2, and a step has 128 columns instead of 64: the same bytes. Tensor cores keep some
   14 bits of a running FP8 sum, so every PROMOTE steps what they summed is added to float32 sums; with PROMOTE 0 it
   stays there. A @ B is then times a_scale[row] and b_scale[column].

   Capital names that are not defined here are constants of the compilation: Config.defines in hopper_24.py, which also
   says what a call must be. Sums are float32, in the order of k: the same bits whatever the tile. NVRTC compiles
   this file with hopper_ptx.cu in it. */

#define PTX __device__ __forceinline__
typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;

struct alignas(64) TensorMap { u64 opaque[16]; };

struct Params {
  const u32* nibbles;    // [slabs of 64 rows of A][chunks of 64 columns][128 threads]
  const int* tiles;      // LISTS: 8 numbers a tile: first step, end step, row, column of C, -, -, row in the block, -
  const int* starts;  // LISTS: CTA p computes tiles[starts[p]:starts[p+1]]
  const int* cols;       // LISTS: block column of every step
  const int* blocks;     // LISTS: stored block of every step
  const void* bias;      // [m] in C's dtype
  const float* a_scale;  // FP8: [m], or one number if a_each is 0
  const float* b_scale;  // FP8: [n], or one number if b_each is 0
  int m, n, a_each, b_each;
  int row_groups, col_tiles;  // tiles of CLUSTER * TM rows, of TN columns
  int group;  // row groups walked together, column by column, so that L2 holds what they share
  int block_steps;       // steps of BK in one block
  int chunks;  // chunks of 64 columns in one block, as in `nibbles`
  int slabs;             // slabs in all of A
  int b_cols;  // columns of B that each CTA of a cluster loads, where B is [N, K]
  int bm, bk;            // LISTS: sides of a block
  float alpha, beta;
};

constexpr int TM = 64 * MS * WGS, THREADS = 128 * (WGS + 1);
constexpr int BK = FP8 ? 128 : 64;                         // columns of A in a slot
constexpr int CHUNKS = BK / 64;  // of 64 columns; a thread has one word of nibbles for each
constexpr int A_BYTES = TM * 64, B_BYTES = TN * 128;       // BK/2 values in a row of A, BK in a column of B
constexpr int E_BYTES = TM * BK / 8;                       // four bits for four columns
constexpr int BOX_N = 64, BOX_BYTES = 64 * BOX_N * 2;      // columns of a box of 64 rows of C
constexpr int BOXES_N = TN / BOX_N, BOXES = MS * BOXES_N;  // boxes side by side, and of a warpgroup's part of a tile
constexpr int A_AT = 0, B_AT = A_AT + STAGES * A_BYTES;  // offsets in shared memory
constexpr int C_AT = B_AT + STAGES * B_BYTES, E_AT = C_AT + WGS * C_BOXES * BOX_BYTES;
constexpr int FULL_AT = E_AT + STAGES * E_BYTES, EMPTY_AT = FULL_AT + STAGES * 8;
static_assert(EMPTY_AT + STAGES * 8 <= SMEM_BYTES, "hopper_24.py counts shared memory differently");
static_assert(A_BYTES % 1024 == 0 && B_BYTES % 1024 == 0, "swizzled tiles begin at multiples of 1024");
static_assert(PROMOTE % 2 == 0 && (FP8 || !PROMOTE), "steps go in pairs; sums of 16 bits are float32 as it is");
static_assert(!FP8 || !B_ROW, "wgmma reads FP8 along K only");
static_assert(!LISTS || CLUSTER == 1, "tiles below each other have lists of their own");

#include "hopper_ptx.cu"

// ---------------------------------------------------------------------------------------------------- PTX wrappers

PTX void tma_load(u32 to, const TensorMap& map, u32 landed, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(landed) : "memory");
}

// The same to the same address in every CTA of the cluster; each CTA's own barrier counts the bytes.
PTX void tma_load_all(u32 to, const TensorMap& map, u32 landed, int x, int y) {
  if constexpr (CLUSTER == 1) tma_load(to, map, landed, x, y);
  else asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(landed), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
}

PTX void bulk_load(u32 to, const void* from, u32 bytes, u32 landed) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(landed) : "memory");
}

// d[64, TN] += A24[64, 32] @ B[32, TN]. `SEL` 0 uses the nibbles of lanes 4i and 4i+1, 1 those of 4i+2 and 4i+3. In
// FP8 it is A24[64, 64] @ B[64, TN], and uses those of all lanes.
#define TEXT(x) #x
#define TEXT_OF(x) TEXT(x)
#if TN == 256
#define SUMS(d) SUMS_256(d)
#define SUM_NAMES NAMES_256
#define IN(i, after192, after128, after64) "%" #i
#elif TN == 192
#define SUMS(d) F32(d, 0), F32(d, 32), F32(d, 64)
#define SUM_NAMES THIRTY(, 1, 2) THIRTY(3, 4, 5) THIRTY(6, 7, 8) "%90, %91, %92, %93, %94, %95"
#define IN(after256, i, after128, after64) "%" #i
#elif TN == 128
#define SUMS(d) F32(d, 0), F32(d, 32)
#define SUM_NAMES THIRTY(, 1, 2) THIRTY(3, 4, 5) "%60, %61, %62, %63"
#define IN(after256, after192, i, after64) "%" #i
#elif TN == 64
#define SUMS(d) F32(d, 0)
#define SUM_NAMES THIRTY(, 1, 2) "%30, %31"
#define IN(after256, after192, after128, i) "%" #i
#endif
#if FP8
#define TYPE "k64.f32" FP8_TYPE  // ".e4m3.e5m2", of A and B
#define TURNING ""
#elif HALF
#define TYPE "k32.f32.f16.f16"
#define TURNING ", 0, " IN(132, 100, 68, 36)
#else
#define TYPE "k32.f32.bf16.bf16"
#define TURNING ", 0, " IN(132, 100, 68, 36)
#endif

// wgmma reads `nibbles` asynchronously: the register must keep them until wgmma was waited for. C++ cannot express
// that. See `load_nibbles`. With `keep` 0 what d held is not added: no thread has to write zeros there, and to wait for
// that.
template <int SEL>
PTX void wgmma(float (&d)[TN / 2], u64 a, u64 b, u32 nibbles, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, " IN(133, 101, 69, 37) ", 0;\n"
      "wgmma.mma_async.sp.sync.aligned.m64n" TEXT_OF(TN) TYPE " {" SUM_NAMES "}, " IN(128, 96, 64, 32)
      ", " IN(129, 97, 65, 33) ", " IN(130, 98, 66, 34) ", " IN(131, 99, 67, 35) ", p, 1, 1" TURNING ";\n}"
      : SUMS(d) : "l"(a), "l"(b), "r"(nibbles), "n"(SEL), "n"(B_ROW), "r"(keep));
}

// Loads the word at `at` into x, if `always` is not 0. The compiler does not know `always`, so the old value of x
// stays in x's register until this load, and a wgmma may read it there until the wait for this step's barrier.
PTX void load_nibbles(u32& x, u32 at, int always) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.shared.b32 %0, [%1];\n}"
               : "+r"(x) : "r"(at), "r"(always) : "memory");
}

// The inverse: pairs in the order of `store_matrix`.
PTX void load_matrix(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4" TURNED ".shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

// The producer's warpgroup releases registers, a consumer takes them. Two warpgroups have all they can use anyway.
PTX void give_registers() { if (WGS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGS)); }
PTX void take_registers() { if (WGS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MATH_REGS)); }

// ---------------------------------------------------------------------------------------------------- tiles and roles

struct Tile {
  int row, col, first, end;  // of C; of its blocks
  int in_block;              // row of the tile in its block
};

// Tile `t` of this CTA; all CTAs of a cluster compute tiles of the same column and blocks.
PTX Tile tile_at(const Params& p, int t, int rank) {
  if constexpr (LISTS) {
    const int* r = p.tiles + 8 * t;
    return {r[2], r[3], r[0], r[1], r[6]};
  } else {
    const int per_band = p.group * p.col_tiles, band = t / per_band;
    const int high = min(p.group, p.row_groups - band * p.group);
    const int col = (t - band * per_band) / high;
    const int row = band * p.group + (t - band * per_band) - col * high;
    return {(row * CLUSTER + rank) * TM, col * TN, 0, 1, 0};
  }
}

struct Range { int begin, end, by; };
PTX Range my_tiles(const Params& p) {
  if constexpr (LISTS) return {p.starts[blockIdx.x], p.starts[blockIdx.x + 1], 1};
  else return {(int)blockIdx.x / CLUSTER, p.row_groups * p.col_tiles, (int)gridDim.x / CLUSTER};
}

struct Ring {
  u32 smem;
  int slot = 0;
  u32 phase;

  PTX u32 full() const { return smem + FULL_AT + slot * 8; }
  PTX u32 empty() const { return smem + EMPTY_AT + slot * 8; }
  PTX void next() { if (++slot == STAGES) slot = 0, phase ^= 1; }
};

// Producer, one thread: for each tile of the CTA, loads the steps of its blocks into the ring.
PTX void load(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& other_map, const Params& p, u32 smem,
              int rank) {
  Ring ring{smem, 0, 1};  // a fresh barrier passes for parity 1: every slot begins empty
  const Range tiles = my_tiles(p);
  Tile next = tile_at(p, tiles.begin, rank);
  int next_col = 0, next_block = 0;  // of the next block, also past the end of a tile, so that no step waits for them
  auto prefetch = [&](int i, int end) { if (LISTS && i < end) next_col = p.cols[i], next_block = p.blocks[i]; };
  prefetch(next.first, next.end);
  for (int t = tiles.begin; t < tiles.end; t += tiles.by) {
    const Tile tile = next;
    next = tile_at(p, t + tiles.by, rank);  // the list has a spare record
    if (tile.first == tile.end) prefetch(next.first, next.end);
    for (int i = tile.first; i < tile.end; i++) {
      const int a_row = LISTS ? next_block * p.bm + tile.in_block : tile.row;
      const int k_begin = LISTS ? next_col * p.bk : 0;
      if (i + 1 < tile.end) prefetch(i + 1, tile.end); else prefetch(next.first, next.end);
      for (int step = 0; step < p.block_steps; step++, ring.next()) {
        // Wait until the consumers in every CTA that receives this slot's B have multiplied its previous contents.
        barrier_wait(ring.empty(), ring.phase);
        const u32 landed = ring.full();
        const int b_bytes = B_ROW ? B_BYTES : CLUSTER * 128 * p.b_cols;  // including the loads of other CTAs
        barrier_expect(landed, A_BYTES + E_BYTES + b_bytes);
        tma_load(smem + A_AT + ring.slot * A_BYTES, a_map, landed, step * (BK / 2), a_row);
        const int k = k_begin + step * BK;
        const u32 b = smem + B_AT + ring.slot * B_BYTES;
        if constexpr (B_ROW) {
          constexpr int K_PART = BK / CLUSTER;
#pragma unroll
          for (int j = 0; j < TN / 64; j++)
            tma_load_all(b + j * (BK * 128) + rank * (K_PART * 128), b_map, landed, tile.col + j * 64,
                         k + rank * K_PART);
        } else {
          tma_load_all(b + rank * p.b_cols * 128, b_map, landed, k, tile.col + rank * p.b_cols);
        }
#pragma unroll
        for (int j = 0; j < TM / 64; j++) {
          // Below the matrix there are no nibbles, and no rows are stored: any legal nibbles will do.
          const i64 slab = min(a_row / 64 + j, p.slabs - 1);
          bulk_load(smem + E_AT + ring.slot * E_BYTES + j * (CHUNKS * 512),
                    p.nibbles + (slab * p.chunks + step * CHUNKS) * 128, CHUNKS * 512, landed);
        }
      }
    }
    if constexpr (COMBINE > 0)
      for (int i = 0; i < MS * WGS; i++, ring.next()) {
        barrier_wait(ring.empty(), ring.phase);  // as above: other CTAs also load B into this slot
        barrier_expect(ring.full(), B_BYTES);
#pragma unroll
        for (int j = 0; j < BOXES_N; j++) {
          const int row = tile.row + i * 64, col = tile.col + j * BOX_N;
          const u32 box = smem + B_AT + ring.slot * B_BYTES + j * BOX_BYTES;
          tma_load(box, other_map, ring.full(), C_COL ? row : col, C_COL ? col : row);
        }
      }
  }
}

// The affine part of the epilogue for rows g and g + 8 of a warp's 16: times `scale`, plus `shift`.
struct Rows { float scale[2], shift[2]; };
PTX Rows rows_of(const Params& p, int first, int lane) {
  Rows rows;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int y = first + 8 * h + lane / 4;
    rows.scale[h] = HAS_ALPHA ? p.alpha : 1.f;
    if (FP8) rows.scale[h] *= p.a_scale[min(y, p.m - 1) * p.a_each];
    rows.shift[h] = BIAS && y < p.m ? widen(((const u16*)p.bias)[y]) : 0.f;
  }
  return rows;
}

// act(scale * e + shift) of a thread's part of 16 columns from `col` on: of every 8 columns 2q and 2q + 1, e[4j] and
// e[4j+1] of row g, the next two of row g + 8.
PTX void finish(float* e, const Params& p, const Rows& rows, int col, int lane) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int h = i / 2 % 2, x = col + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    const float scale = FP8 ? rows.scale[h] * p.b_scale[min(x, p.n - 1) * p.b_each] : rows.scale[h];
    if constexpr (BIAS || HAS_ALPHA || FP8) e[i] = fmaf(e[i], scale, rows.shift[h]);
    e[i] = activated(e[i]);
  }
}

// The address in a box, in lines of 128 bytes swizzled by TMA, of the row that this lane passes to `store_matrix`
// or `load_matrix`: of the four 8 x 8 matrices in the warp's 16 rows and 16 columns from 8j on.
PTX u32 in_box(int j, int warp, int lane) {
  const int down = (lane / 8) % 2, across = lane / 16;  // two matrices of 8 rows above each other, twice
  const int line = C_COL ? 8 * (j + across) + lane % 8 : 16 * warp + 8 * down + lane % 8;
  const int piece = C_COL ? 2 * warp + down : j + across;
  return line * 128 + ((piece ^ (line & 7)) << 4);
}

// Applies the epilogue, with the other matrix, to a warpgroup's box of 64 x BOX_N sums.
PTX void join_box(float* d, u32 other, const Params& p, const Rows& rows, int col, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    float* e = d + 4 * j;
    u32 pairs[4];
    if constexpr (FP8) __syncwarp();  // otherwise ptxas loads the scales of all columns at once, and spills
    load_matrix(pairs, other + in_box(j, warp, lane));
    finish(e, p, rows, col + 8 * j, lane);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float with = widen((u16)(pairs[i / 2] >> i % 2 * 16));
      e[i] = COMBINE == 1 ? fmaf(p.beta, with, e[i]) : e[i] * with;
    }
  }
}

// Stages a warpgroup's box of sums in shared memory, rounded, with the epilogue unless `join_box` applied it. A few
// sums at a time, so that registers suffice for the activation.
PTX void stage_box(u32 box, float* d, const Params& p, const Rows& rows, int col, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    float* e = d + 4 * j;
    if constexpr (!COMBINE) finish(e, p, rows, col + 8 * j, lane);
    store_matrix(box + in_box(j, warp, lane), round_pair(e[0], e[1]), round_pair(e[2], e[3]), round_pair(e[4], e[5]),
                 round_pair(e[6], e[7]));
  }
}

template <int M, int N> PTX void add_to(float (&x)[M][N], const float (&y)[M][N]) {
#pragma unroll
  for (int i = 0; i < M * N; i++) x[i / N][i % N] += y[i / N][i % N];
}

// Wait until d holds all products.
template <int M, int N> PTX void finish_products(float (&d)[M][N]) {
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < M * N; i++) written_until_here(d[i / N][i % N]);
}

// Consumer warpgroup `wg`: its 64*MS rows of every tile.
PTX void multiply(const TensorMap& c_map, const Params& p, u32 smem, int wg, int rank) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4, lane = threadIdx.x % 32;
  const bool leader = threadIdx.x % 128 == 0;
  constexpr u64 A_DESC = described(512, 16, 64);
  constexpr u64 B_DESC = B_ROW ? described(1024, BK * 128, 128) : described(1024, 16, 128);
  const u32 a_ring = smem + A_AT + wg * (MS * 4096), b_ring = smem + B_AT;
  const u32 e_ring = smem + E_AT + wg * (MS * CHUNKS * 512) + (threadIdx.x % 128) * 4;
  const u32 stage = smem + C_AT + wg * (C_BOXES * BOX_BYTES);

  Ring ring{smem, 0, 0};
  u32 before = 0;  // barrier of the slot that the previous step read
  auto multiply_step = [&](float (&d)[MS][TN / 2], u32 (&nibbles)[MS][CHUNKS], int step, int keep) {
    barrier_wait(ring.full(), ring.phase);  // until A, B and nibbles of this step have landed
    const u32 a = a_ring + ring.slot * A_BYTES, b = b_ring + ring.slot * B_BYTES;
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
        load_nibbles(nibbles[m][c], e_ring + ring.slot * E_BYTES + (m * CHUNKS + c) * 512, p.m);
    wgmma_fence();  // the registers are written before wgmma reads them
#pragma unroll
    for (int s = 0; s < 2; s++) {  // halves of the slot
      const u64 b_desc = B_DESC | place(b + (B_ROW ? s * 4096 : s * 64));
#pragma unroll
      for (int m = 0; m < MS; m++) {
        const u64 a_desc = A_DESC | place(a + m * 4096 + s * 32);
        if (s == 1 && !FP8) wgmma<1>(d[m], a_desc, b_desc, nibbles[m][0], 1);
        else wgmma<0>(d[m], a_desc, b_desc, nibbles[m][s % CHUNKS], s == 0 ? keep : 1);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();  // the previous step is done: its slot is free; this step's wgmma continue
    if (step > 0 && lane < CLUSTER) barrier_arrive(before, lane);
    before = ring.empty();
    ring.next();
  };
  // wgmma in flight reads the nibbles of its step, so even and odd steps use different registers. A register is
  // written again two steps later, after the wait of the step between has completed its wgmma.
  u32 nibbles[2][MS][CHUNKS] = {};
  const Range tiles = my_tiles(p);
  Tile next = tile_at(p, tiles.begin, rank);
  for (int t = tiles.begin; t < tiles.end; t += tiles.by) {
    const Tile tile = next;
    next = tile_at(p, t + tiles.by, rank);  // read one tile ahead, so that no tile waits for its record
    const int steps = (tile.end - tile.first) * p.block_steps;
    const int row = tile.row + wg * (64 * MS);
    float d[MS][TN / 2] = {}, sums[MS][TN / 2] = {};  // of this tile alone: no state is kept for the next
    int keep = 1;                                     // whether d has products that `sums` lack
#pragma unroll 1
    for (int step = 0; step < steps;) {
      multiply_step(d, nibbles[0], step, keep);
      keep = 1;
      if (++step == steps) break;
      multiply_step(d, nibbles[1], step, keep);
      ++step;
      if constexpr (PROMOTE > 0)
        if (step % (PROMOTE ? PROMOTE : 2) == 0) {  // the compiler evaluates it with PROMOTE 0 too
          finish_products(d);  // also those of this step: the other warpgroup multiplies meanwhile
          add_to(sums, d);
          keep = 0;
        }
    }
    Rows rows[MS];  // loaded before the last products are done
#pragma unroll
    for (int m = 0; m < MS; m++) rows[m] = rows_of(p, row + 64 * m + 16 * warp, lane);
    finish_products(d);
    if (steps > 0 && lane < CLUSTER) barrier_arrive(before, lane);
    if (PROMOTE && !keep)
#pragma unroll
      for (int i = 0; i < MS * TN / 2; i++) d[i / (TN / 2)][i % (TN / 2)] = 0.f;
    if (PROMOTE) add_to(d, sums);
    if constexpr (COMBINE > 0) {
#pragma unroll 1
      for (int w = 0; w < WGS; w++)
#pragma unroll
        for (int m = 0; m < MS; m++, ring.next()) {
          // Wait until 64 rows of the other matrix have landed; also for those of the other warpgroup: a warpgroup
          // that skips a phase would take the previous phase for the next.
          barrier_wait(ring.full(), ring.phase);
          if (w == wg)
#pragma unroll
            for (int i = 0; i < BOXES_N; i++)
              join_box(d[m] + i * (BOX_N / 2), b_ring + ring.slot * B_BYTES + i * BOX_BYTES, p, rows[m],
                       tile.col + i * BOX_N, warp, lane);
          fence_proxy();  // threads have read what TMA will overwrite
          __syncwarp();  // by all lanes
          if (lane < CLUSTER) barrier_arrive(ring.empty(), lane);
        }
    }

#pragma unroll
    for (int begin = 0; begin < BOXES; begin += C_BOXES) {
      if (leader) tma_store_wait();  // until the previous boxes have been read
      warpgroup_sync(wg);  // all warps wait for that
#pragma unroll
      for (int i = begin; i < BOXES && i < begin + C_BOXES; i++)
        stage_box(stage + (i - begin) * BOX_BYTES, d[i / BOXES_N] + i % BOXES_N * (BOX_N / 2), p, rows[i / BOXES_N],
                  tile.col + i % BOXES_N * BOX_N, warp, lane);
      fence_proxy();  // TMA will read what was just written
      warpgroup_sync(wg);  // until all four warps have written
      if (leader) {
#pragma unroll
        for (int i = begin; i < BOXES && i < begin + C_BOXES; i++) {
          const int y = row + i / BOXES_N * 64, x = tile.col + i % BOXES_N * BOX_N;
          tma_store(c_map, stage + (i - begin) * BOX_BYTES, C_COL ? y : x, C_COL ? x : y);
        }
        tma_store_commit();
      }
    }
  }
  if (leader) tma_store_wait();  // shared memory must live until the last box is read
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    semi24_kernel(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                  const __grid_constant__ TensorMap c_map, const __grid_constant__ Params p,
                  const __grid_constant__ TensorMap other_map) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = (u32)__cvta_generic_to_shared(shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const u32 rank = cluster_rank();
  if (threadIdx.x == 0) {
    if (smem % 1024) __trap();
    for (int i = 0; i < STAGES; i++) {
      barrier_init(smem + FULL_AT + 8 * i, 1);
      barrier_init(smem + EMPTY_AT + 8 * i, 4 * WGS * CLUSTER);  // one lane of every consumer warp
    }
    barriers_made();
  }
  cluster_sync();  // until the barriers of every CTA are initialised
  if (group == 0) {
    give_registers();
    if (threadIdx.x < 32 && elected()) load(a_map, b_map, other_map, p, smem, rank);
    cluster_sync();  // the other CTA may still write here and arrive at barriers here
  } else {
    take_registers();
    multiply(c_map, p, smem, group - 1, rank);
    cluster_sync();
  }
}
