/* C = A @ B on Hopper, where A is block-sparse with blocks of 16 or 32 rows.

       one tile of C                       one stage of the ring
       .---- 128 ----.
       |   slab 0    |  64 rows,           B   [64, 128]  pieces: the rows of B under one block column each
       |   slab 1    |  a warpgroup        A   up to 16 parts: 16 rows of a stored block each
       |   slab 2    |
       |   slab 3    |                     wgmma: D[64, 128] += A[64, 16] @ B[16, 128], A from registers
       '-------------'

   A tile is 8 or 16 block rows. Every piece of B that one of them needs comes once, by TMA. A slab multiplies a piece if
   one of its own block rows stores a block there. Each of its four warps owns 16 rows: it reads its part of that block by
   ldmatrix, or takes zeros. So absent blocks cost neither bytes nor shared memory. A NaN in B under a stored block
   reaches the 64 rows of the slab. Rows of B that no row of a tile needs are not loaded.

   A CTA stays on its SM and walks tiles. Four producer warps fill the ring: one with B (`load_b`), three with A
   (`load_parts`). Lists say which pieces and parts make a stage, and where each warp finds its own (hopper_small.py).

   What bounds it (H200, 2026-11-26, docs/lab-notes.md): some 70 instructions of a warp in a stage, of which only half run
   while its own wgmma do. The tensor pipe is busy in two thirds of all cycles, reads from L2 are at 6 of 9.4 TB/s.

   Capital names that are not defined here are constants of the compilation: Config.defines in hopper_small.py, which
   also says what a call must be. Sums are float32, in the order of k. No include: NVRTC compiles this file as it is. */

#define PTX __device__ __forceinline__
typedef unsigned short u16; typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 opaque[16]; };

struct Params {
  const u16* values;       // stored blocks [nnzb, BM, BK]
  const int* tiles;        // 4 numbers a tile: first stage, end stage, row and column of C
  const int* starts;       // CTA p computes tiles[starts[p]:starts[p+1]]
  const int* cols;         // block column of every piece, PIECES numbers a stage, -1 for none
  const int* places;       // of every stage, warp and piece: where in the stage its rows are, ABSENT, or SKIPPED by its slab
  const int* part_starts;  // stage s brings parts[part_starts[s]:part_starts[s+1]] of A, in the order of the slots
  const int* parts;        // 16 rows of a block, counted over all values
};

constexpr int WGS = 4, WARPS = 4 * WGS, THREADS = 128 * (WGS + 1);
constexpr int TN = 128, DEPTH = 64;                    // a stage holds DEPTH rows of B
constexpr int PIECES = DEPTH / BK;                     // of a stage, at most
constexpr int PIECE_BYTES = BK * TN * 2, B_BYTES = DEPTH * TN * 2;
constexpr int SLOTS = 16, PART_BYTES = 16 * BK * 2, A_BYTES = SLOTS * PART_BYTES;  // A of a stage
constexpr int SKIPPED = -2;  // ABSENT is -1
constexpr int BOX_N = 64, BOX_BYTES = 64 * BOX_N * 2;  // a box of C
constexpr int PLACES_BYTES = WARPS * PIECES * 4;        // `places` of a stage
constexpr int A_AT = STAGES * B_BYTES, C_AT = A_AT + STAGES * A_BYTES, PLACES_AT = C_AT + WGS * BOX_BYTES;
constexpr int FULL_AT = PLACES_AT + STAGES * PLACES_BYTES, EMPTY_AT = FULL_AT + STAGES * 8;
static_assert(EMPTY_AT + STAGES * 8 <= SMEM_BYTES, "hopper_small.py counts shared memory differently");

// ---------------------------------------------------------------------------------------------------- PTX wrappers

PTX void barrier_init(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

// Makes initialised barriers visible to TMA.
PTX void barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

PTX void barrier_expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

PTX void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Waits until the phase of parity `phase` is over. A fresh barrier passes for parity 1, the phase before its first.
PTX void barrier_wait(u32 at, u32 phase) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(at), "r"(phase) : "memory");
  } while (!done);
}

PTX void tma_load(u32 to, const TensorMap& map, u32 landed, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(landed) : "memory");
}

PTX void bulk_load(u32 to, const void* from, u32 bytes, u32 landed) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(landed) : "memory");
}

PTX void tma_store(const TensorMap& map, u32 from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(&map), "r"(x), "r"(y), "r"(from) : "memory");
}

PTX void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until shared memory that stores read may be written again.
PTX void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

PTX void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
PTX void warpgroup_sync(int wg) { asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory"); }

// One lane of a full warp. The compiler sees that it is one, and issues TMA without a loop over lanes.
PTX bool elected() {
  u32 yes;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(yes));
  return yes;
}

PTX void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PTX void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups are in flight.
template <int N> PTX void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Marks x as written here, so that its readers stay after the preceding wait.
PTX void written_until_here(float& x) { asm volatile("" : "+f"(x)::"memory"); }

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define SUMS(d) F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
#define TEN(t)                                                                                                         \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define SUM_NAMES TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63"
#if HALF
#define TYPE "f16.f16"
#else
#define TYPE "bf16.bf16"
#endif
#if C_COL
#define TURNED ".trans"
#else
#define TURNED ""
#endif

// d[64, 128] += A[64, 16] @ B[16, 128].
PTX void wgmma(float (&d)[64], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE " {" SUM_NAMES "}, {%64, %65, %66, %67}, %68, 1, 1, 1, %69;"
      : SUMS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_ROW));
}

// A's fragment of a warp, four 8 x 8 matrices at `at`, if `has` is not 0.
PTX void load_a(u32 (&a)[4], u32 at, u32 has) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]) : "r"(at), "r"(has) : "memory");
}

// Four 8 x 8 matrices; every lane gives the address of one row.
PTX void store_matrix(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4" TURNED ".shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

PTX u32 round_pair(float lower, float upper) {
  u32 pair;
  if constexpr (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
  return pair;
}

// The producer's warpgroup releases registers, the consumers take them: 64 sums a thread, and two steps of A.
PTX void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
PTX void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 112;"); }

// ---------------------------------------------------------------------------------------------------- tiles and roles

// The address in a matrix descriptor: 14 bits, in units of 16 bytes.
__device__ constexpr u64 place(u32 at) { return (at & 0x3FFFF) >> 4; }

// The matrix descriptor without its address: bytes between groups of 8 rows, bytes between panels, swizzle.
__device__ constexpr u64 described(int group_bytes, int panel_bytes, int swizzle_bytes) {
  return (u64)(panel_bytes >> 4) << 16 | (u64)(group_bytes >> 4) << 32 |
         (swizzle_bytes == 128 ? 1ull : swizzle_bytes == 64 ? 2ull : 3ull) << 62;
}

constexpr u64 B_DESC = B_ROW ? described(1024, DEPTH * 128, 128) : described(16 * BK, 16, 2 * BK);

struct Tile { int first, end, row, col; };
PTX Tile tile_at(const Params& p, int t) {
  const int4 record = ((const int4*)p.tiles)[t];
  return {record.x, record.y, record.z, record.w};
}

// A warp's entries of `places` for a stage.
struct Places { int at[PIECES]; };
PTX Places places_at(u32 at) {
  Places x;
  if constexpr (PIECES == 4)
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.at[0]), "=r"(x.at[1]), "=r"(x.at[2]), "=r"(x.at[3]) : "r"(at) : "memory");
  else
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.at[0]), "=r"(x.at[1]) : "r"(at) : "memory");
  return x;
}

struct Ring {
  u32 smem, phase;
  u32 slot = 0;

  PTX u32 full() const { return smem + FULL_AT + slot * 8; }
  PTX u32 empty() const { return smem + EMPTY_AT + slot * 8; }
  PTX void next() { if (++slot == STAGES) slot = 0, phase ^= 1; }
};

// Producer, one thread: for each tile of the CTA, loads the pieces of B that the tile needs into the ring.
PTX void load_b(const TensorMap& b_map, const Params& p, u32 smem) {
  Ring ring{smem, 1};  // a fresh barrier passes for parity 1: every slot begins empty
  const int last = p.starts[blockIdx.x + 1];
  for (int t = p.starts[blockIdx.x]; t < last; t++) {
    const Tile tile = tile_at(p, t);
    int next[PIECES];
    for (int j = 0; j < PIECES; j++) next[j] = p.cols[tile.first * PIECES + j];
    for (int stage = tile.first; stage < tile.end; stage++, ring.next()) {
      int col[PIECES], pieces = 0;
#pragma unroll
      for (int j = 0; j < PIECES; j++) {
        col[j] = next[j], pieces += col[j] >= 0;
        next[j] = p.cols[(stage + 1) * PIECES + j];  // prefetched by one stage
      }
      // Wait until every consumer warp has multiplied the stage's previous contents.
      barrier_wait(ring.empty(), ring.phase);
      barrier_expect(ring.full(), pieces * PIECE_BYTES + PLACES_BYTES);
      bulk_load(smem + PLACES_AT + ring.slot * PLACES_BYTES, p.places + (u64)stage * (WARPS * PIECES), PLACES_BYTES,
                ring.full());
      const u32 to = smem + ring.slot * B_BYTES;
#pragma unroll
      for (int j = 0; j < PIECES; j++)
        if (col[j] >= 0) {
          if constexpr (B_ROW) {
            tma_load(to + j * (BK * 128), b_map, ring.full(), tile.col, col[j] * BK);
            tma_load(to + DEPTH * 128 + j * (BK * 128), b_map, ring.full(), tile.col + 64, col[j] * BK);
          } else {
            tma_load(to + j * PIECE_BYTES, b_map, ring.full(), col[j] * BK, tile.col);
          }
        }
    }
  }
}

// One of three producer warps: loads every third part of A of each stage, each into its slot.
PTX void load_parts(const Params& p, u32 smem, int third) {
  Ring ring{smem, 1};
  const int mine = 3 * (threadIdx.x % 32) + third, last = p.starts[blockIdx.x + 1];
  for (int t = p.starts[blockIdx.x]; t < last; t++) {
    const Tile tile = tile_at(p, t);
    int from = p.part_starts[tile.first], to = p.part_starts[tile.first + 1];
    int next = p.parts[from + mine];  // the list is padded
    for (int stage = tile.first; stage < tile.end; stage++, ring.next()) {
      const int part = next, count = to - from;
      from = to, to = p.part_starts[stage + 2], next = p.parts[from + mine];  // prefetched
      barrier_wait(ring.empty(), ring.phase);
      if (mine == third) barrier_expect(ring.full(), (count + 2 - third) / 3 * PART_BYTES);
      __syncwarp();  // bytes are counted after they were announced
      if (mine < count)
        bulk_load(smem + A_AT + ring.slot * A_BYTES + mine * PART_BYTES, p.values + (u64)part * (16 * BK), PART_BYTES,
                  ring.full());
    }
  }
}

// The address in a box, in lines of 128 bytes swizzled by TMA, of the row that this lane passes to `store_matrix`: of
// the four 8 x 8 matrices in the warp's 16 rows and 16 columns from 8j on.
PTX u32 in_box(int j, int warp, int lane) {
  const int down = (lane / 8) % 2, across = lane / 16;
  const int line = C_COL ? 8 * (j + across) + lane % 8 : 16 * warp + 8 * down + lane % 8;
  const int piece = C_COL ? 2 * warp + down : j + across;
  return line * 128 + ((piece ^ (line & 7)) << 4);
}

// Consumer warp: with the three others of its warpgroup, 64 rows of every tile.
PTX void multiply(const TensorMap& c_map, const Params& p, u32 smem, int warp) {
  const int lane = threadIdx.x % 32, wg = warp / 4, in_wg = warp % 4;
  const u32 stage_c = smem + C_AT + wg * BOX_BYTES;
  const u32 fragment = (lane % 16) * (2 * BK) + (lane / 16) * 16;  // of this lane's row in `load_a`
  const int first = p.starts[blockIdx.x], last = p.starts[blockIdx.x + 1];
  u32 x[PIECES][BK / 16][4] = {};  // the warp's rows of A under a stage
  Ring ring{smem, 0};
  u32 before = 0;  // barrier of the slot that the previous stage read
  Tile tile = tile_at(p, first), next = tile_at(p, first + 1);
#pragma unroll 1
  for (int t = first; t < last; t++) {
    const Tile then = tile_at(p, t + 2);  // prefetched during a whole tile
    const int stages = tile.end - tile.first;
    float d[64] = {};
#pragma unroll 1
    for (int i = 0; i < stages; i++) {
      const u32 a = smem + A_AT + ring.slot * A_BYTES + fragment;
      const u64 b = B_DESC | place(smem + ring.slot * B_BYTES);
      barrier_wait(ring.full(), ring.phase);  // until the stage has landed
      const Places now = places_at(smem + PLACES_AT + ring.slot * PLACES_BYTES + warp * (4 * PIECES));
      // Half of the pieces at a time: ldmatrix fills the registers of one half while wgmma read those of the other.
#pragma unroll
      for (int half = 0; half < 2; half++) {
        constexpr int HALF_PIECES = PIECES / 2;
#pragma unroll
        for (int j = half * HALF_PIECES; j < (half + 1) * HALF_PIECES; j++)
#pragma unroll
          for (int k = 0; k < BK / 16; k++) load_a(x[j][k], a + now.at[j] + k * 32, now.at[j] >= 0);
#pragma unroll
        for (int j = half * HALF_PIECES; j < (half + 1) * HALF_PIECES; j++)
          if (now.at[j] != SKIPPED) {
#pragma unroll
            for (int k = 0; k < BK / 16; k++)
#pragma unroll
              for (int r = 0; r < 4; r++) x[j][k][r] = now.at[j] >= 0 ? x[j][k][r] : 0;
            wgmma_fence();  // the registers are written before wgmma reads them
#pragma unroll
            for (int k = 0; k < BK / 16; k++)
              wgmma(d, x[j][k], b + (B_ROW ? j * BK * 128 + k * 16 * 128 : j * PIECE_BYTES + k * 32) / 16);
          }
        wgmma_commit();
        wgmma_wait<1>();  // the other half was multiplied; this one's wgmma continue
        if (half == 0 && i > 0 && elected()) barrier_arrive(before);
      }
      before = ring.empty();
      ring.next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 64; i++) written_until_here(d[i]);
    if (stages > 0 && elected()) barrier_arrive(before);
    const int row = tile.row + 64 * wg, col = tile.col;
    tile = next, next = then;
#pragma unroll
    for (int box = 0; box < TN / BOX_N; box++) {
      if (threadIdx.x % 128 == 0) tma_store_wait();  // until the previous box has been read
      warpgroup_sync(wg);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float* e = d + box * 32 + 4 * j;
        store_matrix(stage_c + in_box(j, in_wg, lane), round_pair(e[0], e[1]), round_pair(e[2], e[3]),
                     round_pair(e[4], e[5]), round_pair(e[6], e[7]));
      }
      fence_proxy();  // TMA will read what was just written
      warpgroup_sync(wg);
      if (threadIdx.x % 128 == 0) {
        tma_store(c_map, stage_c, C_COL ? row : col + box * BOX_N, C_COL ? col + box * BOX_N : row);
        tma_store_commit();
      }
    }
  }
  if (threadIdx.x % 128 == 0) tma_store_wait();  // shared memory must live until the last box is read
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    small_kernel(const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap c_map,
                 const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = (u32)__cvta_generic_to_shared(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    if (smem % 1024) __trap();
    for (int i = 0; i < STAGES; i++) {
      barrier_init(smem + FULL_AT + 8 * i, 4);  // producer warps
      barrier_init(smem + EMPTY_AT + 8 * i, WARPS);
    }
    barriers_made();
  }
  __syncthreads();
  if (warp >= WARPS) {
    give_registers();
    if (warp > WARPS) load_parts(p, smem, warp - WARPS - 1);
    else if (elected()) load_b(b_map, p, smem);
  } else {
    take_registers();
    multiply(c_map, p, smem, warp);
  }
}
