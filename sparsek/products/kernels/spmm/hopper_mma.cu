/* C = act(alpha * (A @ B) + bias[:, None]) on Hopper, where A is block-sparse with blocks of 16 x 16. Warps multiply by
   mma.sync, each only the blocks that its block rows have.

       a tile of C                        what a slot of the ring holds: 16 block columns of B
       .------ 64 ------.                          .------ 64 ------.
       | warp 0: 2 x 16 |  two block rows, from    |                |
       |----------------|  anywhere in A           |  B [256, 64]   |   each warp has a mask of a slot: which of its
       | warp 1         |                          |                |   2 x 16 blocks are stored
       |      ...       |                          '----------------'
       | warp 15        |
       '----------------'

   A CTA stays on its SM and walks tiles. One warp fills the ring by TMA (`load_b`), with what any block row of the tile
   needs. 16 warps multiply (`multiply`): for each block column of a slot that one of its rows needs, a warp reads B into
   registers once. Blocks of A come by cp.async in the order in which the warp needs them, AHEAD of them under way
   (`Stream`), over the ends of tiles; no other warp reads them. A wgmma would need 64 rows with a common column.

   Bottleneck (docs/notes/products-paired.md): shared memory, of which B's part is read again by each of 16 warps.

   Capital names that are not defined here are constants of the compilation: Config.defines in hopper_mma.py, which also
   describes what a call must be. Sums are float32. NVRTC compiles this file with hopper_ptx.cu in it. */

#define PTX __device__ __forceinline__
typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;

struct alignas(64) TensorMap { u64 opaque[16]; };

struct Params {
  const int* tiles;   // 4 numbers a tile: first slot, end slot, unit, column of C
  const int* starts;  // CTA p computes tiles[starts[p]:starts[p+1]]
  const int* rows;    // [units][WARPS][2]: rows of C; outside C for none
  const int* slots;   // [count]: the first row of B of each slot of a unit
  const u32* masks;   // [WARPS][count]: bit 31 - (2 * column + row) for each stored block of a warp in a slot
  const int* begins;  // [units * WARPS + 1]: the first block of each warp in `order`
  const int* order;   // [nnzb + AHEAD + 1]: stored blocks as warps need them, and others
  const void* values; // [nnzb, 16, 16]: A
  const void* bias;   // [m] in C's dtype
  void* c;
  i64 ld;             // numbers from a row of C to the next; with C_COL, of its transpose
  int count;          // slots, with 32 spare ones
  int m, n;
  float alpha;
};

constexpr int PANEL_BYTES = 8192, PANELS = DEPTH / 4;  // of B: 64 rows and 64 columns
constexpr int SLOT_BYTES = PANELS * PANEL_BYTES, BLOCK_BYTES = SIDE * SIDE * 2;
constexpr int B_AT = 0, A_AT = STAGES * SLOT_BYTES, FULL_AT = A_AT + WARPS * AHEAD * BLOCK_BYTES;
constexpr int EMPTY_AT = FULL_AT + 8 * STAGES;
static_assert(EMPTY_AT + 8 * STAGES == SMEM_BYTES, "hopper_mma.py counts shared memory differently");
static_assert((AHEAD & AHEAD - 1) == 0 && 2 * DEPTH <= 32 && DEPTH * SIDE <= 256 && COLS == 64 && SIDE == 16, "");
#define CLUSTER 1

#include "hopper_ptx.cu"

// ---------------------------------------------------------------------------------------------------- PTX wrappers

PTX void tma_load(u32 to, const TensorMap& map, u32 landed, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(landed) : "memory");
}

PTX void copy(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
PTX void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread's copies are under way.
template <int N> PTX void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Four 8 x 8 matrices, or their transposes; every lane gives the address of one row.
template <bool TURN> PTX void load_matrix(u32 (&x)[4], u32 at) {
  if constexpr (TURN)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

#if HALF
#define TYPE "f16.f16"
#else
#define TYPE "bf16.bf16"
#endif

// d[16, 8] += a[16, 16] @ b[16, 8]. Volatile: it stays before the arrival that frees b.
PTX void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

PTX u32 transposed(u32 x) { asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x)); return x; }

// Past the other contents of L2: C is not read again here.
PTX void store(void* to, uint4 x) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// The producer's warpgroup releases registers, a consumer takes them: 640 threads begin with 96.
PTX void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 32;"); }
PTX void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 112;"); }

// A value that the compiler keeps in a register; else it computes such addresses again for each block.
PTX u32 kept(u32 x, int lane) { return __shfl_sync(~0u, x, lane); }

// ---------------------------------------------------------------------------------------------------- tiles and roles

struct Tile { int first, end, unit, col; };
PTX Tile tile_at(const Params& p, int t) {
  const int4 record = ((const int4*)p.tiles)[t];
  return {record.x, record.y, record.z, record.w};
}

// Where a role is in the ring of B.
struct Ring {
  u32 smem, phase, slot = 0;

  PTX u32 full() const { return smem + FULL_AT + slot * 8; }
  PTX u32 empty() const { return smem + EMPTY_AT + slot * 8; }
  PTX u32 b() const { return smem + B_AT + slot * SLOT_BYTES; }
  PTX void next() { if (++slot == STAGES) slot = 0, phase ^= 1; }
};

// The producer of B: one thread.
PTX void load_b(const TensorMap& map, const Params& p, u32 smem) {
  Ring ring{smem, 1};  // a fresh barrier passes for parity 1: every slot begins empty
  const int begin = p.starts[blockIdx.x], last = p.starts[blockIdx.x + 1];
  Tile next_tile = tile_at(p, begin);
  for (int t = begin; t < last; t++) {
    const Tile tile = next_tile;
    next_tile = tile_at(p, t + 1);  // the list ends with a spare one
    int coming = p.slots[tile.first];
    for (int s = tile.first; s < tile.end; s++) {
      const int k = coming;
      coming = p.slots[s + 1];
      barrier_wait(ring.empty(), ring.phase);  // until all warps have read the slot's contents
      barrier_expect(ring.full(), SLOT_BYTES);  // what is outside B arrives as zeros, and counts
#pragma unroll
      for (int i = 0; i < (B_ROW ? 1 : PANELS); i++)
        tma_load(ring.b() + i * PANEL_BYTES, map, ring.full(), B_ROW ? tile.col : k + 64 * i, B_ROW ? k : tile.col);
      ring.next();
    }
  }
}

// A warp's blocks of A, over all tiles of the CTA. A lane copies 16 bytes of each.
struct Stream {
  const Params& p;
  const int* next;          // in `order`
  int coming, left;         // the block to copy next; so many of its tile
  int tile, last, warp;     // the tile after it
  int first = 0, end = 0;   // of `order`, in that tile
  u32 ring, at = 0, put, get;  // all slots; the one in use, to be overwritten next; this lane's places in a slot
  const char* from;

  PTX Stream(const Params& p, u32 smem, int warp, int lane) : p(p), warp(warp) {
    // Pieces of 16 bytes: halves of rows 4 to 7 and 12 to 15 change places, or 8 rows would share banks.
    const int row = A_COL ? lane % 8 + lane / 16 * 8 : lane % 16, half = A_COL ? lane / 8 % 2 : lane / 16;
    ring = smem + A_AT + warp * (AHEAD * BLOCK_BYTES);
    put = kept(lane / 2 * 32 + ((lane % 2 ^ lane / 8 % 2) << 4), lane);
    get = kept(row * 32 + ((half ^ row / 4 % 2) << 4), lane);
    from = (const char*)p.values + lane * 16;
    asm volatile("" : "+l"(from));  // one sum, not two for each block
    tile = p.starts[blockIdx.x], last = p.starts[blockIdx.x + 1];
    next = p.order, coming = *next;
    bounds();
    turn(lane);
#pragma unroll 1
    for (int i = 0; i < AHEAD; i++) fetch(i * BLOCK_BYTES, lane);
  }
  // Where the blocks of `tile` are. They are needed when those of the tile before have been copied.
  PTX void bounds() {
    if (tile == last) return;
    const int group = p.tiles[4 * tile + 2] * WARPS + warp;
    first = p.begins[group], end = p.begins[group + 1];
  }
  // Goes on to the next tile with a block. After the last one it copies AHEAD others, which nobody reads.
  PTX void turn(int lane) {
    left = 0;
    while (left == 0 && tile < last) {
      left = end - first;
      // Kept, or the loaded index would go to a uniform register at once, which waits for the load.
      if (left) next = p.order + kept(first, lane), coming = *next;
      tile++;
      bounds();
    }
    if (left == 0) left = 2 * AHEAD;
  }
  PTX void fetch(u32 slot, int lane) {
    copy(ring + slot + put, from + (i64)coming * BLOCK_BYTES);
    copies_commit();
    coming = *++next;
    if (--left == 0) turn(lane);
  }
  // Reads the block in use, once all lanes' copies of it have landed.
  PTX void read(u32 (&a)[4]) {
    copies_wait<AHEAD - 1>();
    __syncwarp();
    load_matrix<A_COL>(a, ring + at + get);
  }
  // All lanes have read the block in use: a copy that begins here lands after that.
  PTX void advance(u32 (&a)[4], int lane) {
    fetch(at, lane);
    at = (at + BLOCK_BYTES) % (AHEAD * BLOCK_BYTES);
    read(a);
  }
};

// Reads the block column `k` of a slot: of 16 columns of B at a time, rows 0-7 and 8-15 of 8, and of the next 8.
struct Columns {
  u32 off[B_ROW ? 4 : 1];

  PTX Columns(int lane) {
#pragma unroll
    for (int j = 0; j < (B_ROW ? 4 : 1); j++)
      off[j] = B_ROW ? lane % 16 * 128 + (((2 * j + lane / 16) ^ lane % 8) << 4)
                     : (lane / 16 * 8 + lane % 8) * 128 + ((lane / 8 % 2 ^ lane % 8) << 4);
#pragma unroll
    for (u32& each : off) each = kept(each, lane);
  }
  PTX void read(u32 (&b)[4][4], u32 slot, u32 k) const {
#pragma unroll
    for (int j = 0; j < 4; j++)
      if constexpr (B_ROW) load_matrix<true>(b[j], slot + k * (SIDE * 128) + off[j]);
      else load_matrix<false>(b[j], slot + k / 4 * PANEL_BYTES + j * (16 * 128) + (off[0] ^ k % 4 << 5));
  }
};

// Four words of lane q of a quad, of groups 0 to 3, become the four words of group q.
PTX uint4 transpose_quad(u32 w0, u32 w1, u32 w2, u32 w3, int lane) {
  const bool x = lane & 1, y = lane & 2;
  const u32 r01 = __shfl_xor_sync(~0u, x ? w0 : w1, 1), r23 = __shfl_xor_sync(~0u, x ? w2 : w3, 1);
  const u32 p0 = x ? r01 : w0, p1 = x ? w1 : r01, p2 = x ? r23 : w2, p3 = x ? w3 : r23;
  const u32 s0 = __shfl_xor_sync(~0u, y ? p0 : p2, 2), s1 = __shfl_xor_sync(~0u, y ? p1 : p3, 2);
  return y ? make_uint4(s0, s1, p2, p3) : make_uint4(p0, p1, s0, s1);
}

// act(alpha * d + bias) of a block row at `row`, to C. A lane stores 8 adjacent numbers, which neighbours hold.
PTX void finish(const float (&d)[8][4], const Params& p, int row, int col, int lane) {
  float shift[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int y = row + lane / 4 + 8 * h;
    shift[h] = BIAS && y < p.m ? widen(((const u16*)p.bias)[y]) : 0.f;
  }
  auto finished = [&](int j, int h, int i) {
    float x = d[j][2 * h + i];
    if constexpr (BIAS || HAS_ALPHA) x = fmaf(x, HAS_ALPHA ? p.alpha : 1.f, shift[h]);
    return activated(x);
  };
  auto word = [&](int j, int h) { return round_pair(finished(j, h, 0), finished(j, h, 1)); };
  u16* c = (u16*)p.c;
  const int q = lane % 4;
#pragma unroll
  for (int j = 0; j < 8; j += C_COL ? 2 : 4)
    if constexpr (C_COL) {
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = transposed(word(j + i / 2, i % 2));
      const int x = col + 8 * (j + q / 2) + lane / 4, y = row + q % 2 * 8;
      const uint4 out = transpose_quad(w[0], w[1], w[2], w[3], lane);
      if (x < p.n && y < p.m) store(c + x * p.ld + y, out);
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int x = col + 8 * (j + q), y = row + lane / 4 + 8 * h;
        const uint4 out = transpose_quad(word(j, h), word(j + 1, h), word(j + 2, h), word(j + 3, h), lane);
        if (x < p.n && y < p.m) store(c + y * p.ld + x, out);
      }
    }
}

// Consumer warp `warp`: its two block rows of every tile.
PTX void multiply(const Params& p, u32 smem, int warp, int lane) {
  const int begin = p.starts[blockIdx.x], last = p.starts[blockIdx.x + 1];
  const u32* own_masks = p.masks + (i64)warp * p.count + lane;
  Stream stream(p, smem, warp, lane);
  const Columns columns(lane);
  Ring ring{smem, 0};
  u32 a[4];
  stream.read(a);
  Tile next_tile = tile_at(p, begin);
  u32 coming = own_masks[next_tile.first];  // of 32 slots, one a lane
#pragma unroll 1
  for (int t = begin; t < last; t++) {
    const Tile tile = next_tile;
    next_tile = tile_at(p, t + 1);
    float d[2][8][4] = {};
    u32 masks = 0;
#pragma unroll 1
    for (int s = 0; s < tile.end - tile.first; s++) {
      if (s % 32 == 0) masks = coming;
      u32 mask = __shfl_sync(~0u, masks, s % 32);
      barrier_wait(ring.full(), ring.phase);  // until B has landed
      if (s % 32 == 0)  // after the wait: the register is copied at once, which waits for the load
        coming = own_masks[tile.first + s + 32 < tile.end ? tile.first + s + 32 : next_tile.first];
      u32 k = __clz(mask) / 2;
#pragma unroll 1
      while (mask) {
        const u32 members = mask << 2 * k;
        u32 b[4][4];
        columns.read(b, ring.b(), k);
        mask &= ~(0xC0000000u >> 2 * k);
        k = __clz(mask) / 2;  // of the next column, while tensor cores multiply this one
        asm volatile("" : "+r"(k));
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (members & 0x80000000u >> r) {
#pragma unroll
            for (int j = 0; j < 8; j++) mma(d[r][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            stream.advance(a, lane);
          }
      }
      __syncwarp();  // until all lanes have passed the wait, and their parts of B are in registers
      if (lane == 0) barrier_arrive(ring.empty(), 0);
      ring.next();
    }
    if (tile.first == tile.end) coming = own_masks[next_tile.first];
#pragma unroll
    for (int r = 0; r < 2; r++) finish(d[r], p, p.rows[(tile.unit * WARPS + warp) * 2 + r], tile.col, lane);
  }
  copies_wait<0>();  // shared memory must live until they have landed
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mma_kernel(const __grid_constant__ TensorMap b_map, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = (u32)__cvta_generic_to_shared(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = kept(threadIdx.x % 32, threadIdx.x % 32);
  if (threadIdx.x == 0) {
    if (smem % 1024) __trap();
    for (int i = 0; i < STAGES; i++) {
      barrier_init(smem + FULL_AT + 8 * i, 1);
      barrier_init(smem + EMPTY_AT + 8 * i, WARPS);  // one lane of every consumer
    }
    barriers_made();
  }
  __syncthreads();  // until the barriers are initialised
  if (warp >= WARPS) {
    give_registers();
    if (warp == WARPS && lane == 0) load_b(b_map, p, smem);
  } else {
    take_registers();
    multiply(p, smem, warp, lane);
  }
}
