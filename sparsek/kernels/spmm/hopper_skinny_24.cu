/* C = act(alpha * (A @ B) + bias[:, None]), joined with another matrix, for a 2:4 A and up to 64 columns of B.

       rows of C            K, cut into PARTS                       one step of a warp: 16*MS rows, 64 columns of A
     .------------.  .---------.---------.---------.
     | tile of TM |  |  CTA 0  |  CTA 1  |  ...    |  a cluster     a quad of lanes brings 64 bytes of values of a row,
     |------------|  |---------|---------|---------|                lane t the groups 4t to 4t+3, its operands of two
     |            |  |  CTA 0  |  ...    |         |                mma.sp; and, in every fourth step, 32 bytes of
     '------------'  '---------'---------'---------'                metadata, lane t the 8 of one step

   A's bytes decide, so what counts is how many are under way. A warp has DEPTH steps on their way into its part of
   shared memory, where each lane reads the values that it brought itself: nothing but its own warp waits for them. B
   lies in shared memory ROOM units of 256 columns of A at a time, in the order in which lanes hand it to mma.sp. The
   CTAs of a cluster add their sums through shared memory, in the order of K: the same bits in every run.

   mma.sp pairs lane t's stored values with columns 4t and 16 + 4t of its 32. Which columns of A those are is free, as
   long as B and the metadata agree. Of a step's 64 columns, mma number s takes groups 4t + 2s and 4t + 2s + 1 of lane
   t: so lane t of a quad hands over the metadata of groups t, 4 + t, 8 + t and 12 + t, of which each mma reads half.

   Capital names that are not defined here are constants of the compilation: Config.defines in hopper_skinny_24.py. No
   include: NVRTC compiles this file as it is. */

#define PTX __device__ __forceinline__
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef long long i64;

struct alignas(16) Quad { u32 x[4]; };
struct Pair { u32 x[2]; };

struct Params {
  const u8* values;                       // [m, k/2]
  const u8* meta;                         // [m, k/8] bytes
  const u16* b;                           // [k, n]
  u16* c;                                 // [m, n]
  const u16* bias;                        // [m] or null
  const u16* other;                       // [m, n], or null where it is C itself
  i64 sb_k, sb_n, sc_m, sc_n, so_m, so_n; // strides in elements
  int m, n, k;
  int wide;                               // columns of B lie in memory as whole 16 bytes
  int by_columns;                         // C is written along m
  int activation, combine;                // numbers, as in hopper_24.py
  float alpha, beta;
};

constexpr int THREADS = 32 * WARPS, TM = 16 * MS * WARPS, ROWS = TM / PARTS;
constexpr int PITCH = TM + 4;                 // of sums in shared memory: lanes of a warp write to 32 banks
constexpr int STEP_QUADS = NT * 64;           // B of a step: [NT tiles of 8 columns][2 mma][32 lanes] Quads
constexpr int STEP_BYTES = MS * 2 * 512;      // values of a warp's step: [MS][rows g, g + 8][32 lanes] Quads
constexpr int UNITS = (DEPTH + 3) / 4 + 1;    // places for metadata: under way, and of the step at hand
constexpr int UNIT_BYTES = MS * 2 * 256;      // metadata of a warp's four steps: [MS][rows g, g + 8][8 rows][4 steps] Pairs
constexpr int RING_AT = ROOM * 4 * STEP_QUADS * 16, META_AT = RING_AT + WARPS * DEPTH * STEP_BYTES;
static_assert(META_AT + WARPS * UNITS * UNIT_BYTES <= SMEM_BYTES, "hopper_skinny_24.py counts shared memory differently");
static_assert(8 * NT * PITCH * 4 <= SMEM_BYTES, "sums need more shared memory");

// ---------------------------------------------------------------------------------------------------- PTX wrappers

// Copies that a thread waits for by groups. L2 fetches 256 bytes: the next steps want what lies behind.
PTX void copy16(void* to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;"
               ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
PTX void copy8(void* to, const u8* from) {
  asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], 8;"
               ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
PTX void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most N groups of this thread's are under way.
template <int N> PTX void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

PTX Quad load_quad(const u16* at) {
  Quad q;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.x[0]), "=r"(q.x[1]), "=r"(q.x[2]), "=r"(q.x[3]) : "l"(at));
  return q;
}

#if HALF
#define TYPES "f32.f16.f16.f32"
#else
#define TYPES "f32.bf16.bf16.f32"
#endif
// d[16, 8] += A24[16, 32] @ B[32, 8]. Of a quad, lanes 2*SEL and 2*SEL + 1 give the metadata: of 16 columns each, of
// row g in the low half and of row g + 8 in the high half.
template <int SEL> PTX void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, const Quad& b, u32 meta) {
  asm volatile(
      "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." TYPES
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]), "r"(meta), "n"(SEL));
}

// Low halves of x and y.
PTX u32 halves(u32 x, u32 y) { return __byte_perm(x, y, 0x5410); }

PTX u8* shared_memory() {
  extern __shared__ __align__(16) u8 shared[];
  return shared;
}
PTX void warp_sync() { __syncwarp(); }
PTX void block_sync() { __syncthreads(); }
PTX int cluster_rank() {
  u32 rank = 0;
  if constexpr (PARTS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
PTX void cluster_sync() {
  if constexpr (PARTS == 1) __syncthreads();
  else asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What CTA `rank` of the cluster has where this one has *at.
PTX float of_peer(const float* at, int rank) {
  if constexpr (PARTS == 1) return *at;
  float x;
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
               : "=f"(x) : "r"((u32)__cvta_generic_to_shared(at)), "r"(rank) : "memory");
  return x;
}

PTX u16 rounded(float x) {
  u16 y;
  if constexpr (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

PTX float widen(u16 x) {
  float y = __uint_as_float((u32)x << 16);
  if constexpr (HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// ---------------------------------------------------------------------------------------------------- tiles and roles

// B[k:k+8, n], zeros beyond n.
PTX Quad eight(const Params& p, int k, int n) {
  Quad q = {};
  if (n >= p.n) return q;
  const u16* at = p.b + k * p.sb_k + n * p.sb_n;
  if (p.wide) return load_quad(at);
#pragma unroll
  for (int i = 0; i < 4; i++) q.x[i] = at[2 * i * p.sb_k] | (u32)at[(2 * i + 1) * p.sb_k] << 16;
  return q;
}

// B of `count` steps from `first` on. Lane 4g + t of mma s takes column g, and of the step's rows
// 16 * (t/2) + 8s + 2 * (t%2) + {0, 32, 4, 36} two each. So columns k to k+7 and k+32 to k+39 are two lanes' quads.
PTX void bring_b(Quad* to, const Params& p, int first, int count) {
  constexpr int AT_ONCE = RESIDENT * THREADS > 768 ? 2 : 4;  // loads that do not wait for each other
  for (int begin = threadIdx.x; begin < count * NT * 32; begin += AT_ONCE * THREADS) {
    Quad low[AT_ONCE], high[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int item = begin + i * THREADS, n = item / 4 % (8 * NT), k = (first + item / (32 * NT)) * 64 + item % 4 * 8;
      if (item < count * NT * 32) low[i] = eight(p, k, n), high[i] = eight(p, k + 32, n);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int item = begin + i * THREADS, s = item % 2, e = item / 2 % 2, n = item / 4 % (8 * NT);
      if (item >= count * NT * 32) break;
      Quad* at = to + (item / (32 * NT)) * STEP_QUADS + (n / 8 * 2 + s) * 32 + n % 8 * 4 + 2 * e;
      const Quad even = {low[i].x[0], high[i].x[0], low[i].x[2], high[i].x[2]};
      const Quad odd = {low[i].x[1], high[i].x[1], low[i].x[3], high[i].x[3]};
      at[s] = s ? odd : even;  // so eight lanes write to 32 banks
      at[1 - s] = s ? even : odd;
    }
  }
}

// Of 16 groups the four that mma.sp wants of lane t: t, 4 + t, 8 + t and 12 + t.
PTX u32 nibbles_of(const Pair& groups, int t) {
  const u32 x = (groups.x[0] >> 4 * t & 0x000F000F) | (groups.x[1] >> 4 * t & 0x000F000F) << 8;
  return x | x >> 12;  // in the low half
}

PTX float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

PTX float activated(float z, int activation) {
  switch (activation) {
    case 1: return z < 0.f ? 0.f : z;  // NaN stays
    case 2: return 0.5f * z * (1.f + erff(z * 0.70710678f));
    case 3: return z * sigmoid(z * (1.5957691f + 0.071354816f * z * z));
    case 4: return z * sigmoid(z);
    default: return z;
  }
}

extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    semi24_skinny_kernel(const __grid_constant__ Params p) {
  u8* const shared = shared_memory();
  Quad* const b_quads = (Quad*)shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = cluster_rank(), tile = (int)blockIdx.x / PARTS * TM;
  // This CTA's part of K: whole units of 256 columns, four steps, but for the end of K.
  const int steps = p.k / 64, units = (steps + 3) / 4;
  const int first = (int)((i64)units * rank / PARTS) * 4, end = min((int)((i64)units * (rank + 1) / PARTS) * 4, steps);

  u8* const ring = shared + RING_AT + warp * (DEPTH * STEP_BYTES);
  u8* const nibbles = shared + META_AT + warp * (UNITS * UNIT_BYTES);
  const u8 *values[MS * 2], *meta[MS * 2];
#pragma unroll
  for (int i = 0; i < MS * 2; i++) {
    // Below the matrix the last row is read again; its sums are not stored.
    const i64 row = min(tile + (warp * MS + i / 2) * 16 + i % 2 * 8 + g, p.m - 1);
    values[i] = p.values + row * p.k + 16 * t;
    meta[i] = p.meta + row * (p.k / 8) + 8 * t;
  }
  auto bring = [&](int step, int slot) {  // one group, empty behind the end
    if (step < end) {
#pragma unroll
      for (int i = 0; i < MS * 2; i++)
        copy16(ring + slot * STEP_BYTES + i * 512 + lane * 16, values[i] + (i64)step * 64);
      if (step % 4 == 0 && step + t < end)
#pragma unroll
        for (int i = 0; i < MS * 2; i++)
          copy8(nibbles + step / 4 % UNITS * UNIT_BYTES + i * 256 + lane * 8, meta[i] + (i64)step * 8);
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; i++) bring(first + i, i);

  float d[MS][NT][4] = {};
  for (int begin = first, slot = 0; begin < end; begin += 4 * ROOM) {
    const int stop = min(begin + 4 * ROOM, end);
    block_sync();  // all warps have multiplied by what lies there
    bring_b(b_quads, p, begin, stop - begin);
    block_sync();  // B is written
    for (int step = begin; step < stop; step++) {
      wait_copies<DEPTH - 1>();  // this step's
      warp_sync();               // those of the other lanes: metadata
      Quad a[MS * 2];
      u32 e[MS];
#pragma unroll
      for (int i = 0; i < MS * 2; i++) a[i] = *(const Quad*)(ring + slot * STEP_BYTES + i * 512 + lane * 16);
#pragma unroll
      for (int m = 0; m < MS; m++) {
        const Pair* of_row = (const Pair*)(nibbles + step / 4 % UNITS * UNIT_BYTES + m * 512) + g * 4 + step % 4;
        e[m] = halves(nibbles_of(of_row[0], t), nibbles_of(of_row[32], t));
      }
      const Quad* b = b_quads + (step - begin) * STEP_QUADS + lane;
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const Quad b0 = b[j * 64], b1 = b[j * 64 + 32];
#pragma unroll
        for (int m = 0; m < MS; m++) {
          const Quad &low = a[2 * m], &high = a[2 * m + 1];  // rows g and g + 8
          mma<0>(d[m][j], low.x[0], high.x[0], low.x[1], high.x[1], b0, e[m]);
          mma<1>(d[m][j], low.x[2], high.x[2], low.x[3], high.x[3], b1, e[m]);
        }
      }
      bring(step + DEPTH, slot);  // the lane has read its values: they were multiplied
      if (++slot == DEPTH) slot = 0;
    }
  }

  block_sync();  // all warps have multiplied: sums take B's place
  float* const sums = (float*)shared;  // [8*NT][PITCH]
#pragma unroll
  for (int m = 0; m < MS; m++)
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        sums[(8 * j + 2 * t + i % 2) * PITCH + (warp * MS + m) * 16 + i / 2 * 8 + g] = d[m][j][i];
  cluster_sync();  // the sums of all parts are written

  // Each CTA of the cluster finishes its share of the rows.
  for (int at = threadIdx.x; at < ROWS * p.n; at += THREADS) {
    const int r = p.by_columns ? at % ROWS : at / p.n, n = p.by_columns ? at / ROWS : at % p.n;
    const i64 row = tile + rank * ROWS + r;
    if (row >= p.m) continue;
    float part[PARTS], z = 0.f;
#pragma unroll
    for (int q = 0; q < PARTS; q++) part[q] = of_peer(sums + n * PITCH + rank * ROWS + r, q);
#pragma unroll
    for (int q = 0; q < PARTS; q++) z += part[q];
    z *= p.alpha;
    if (p.bias) z += widen(p.bias[row]);
    z = activated(z, p.activation);
    if (p.combine) {
      const float with = widen(p.other ? p.other[row * p.so_m + n * p.so_n] : p.c[row * p.sc_m + n * p.sc_n]);
      z = p.combine == 1 ? fmaf(p.beta, with, z) : z * with;
    }
    p.c[row * p.sc_m + n * p.sc_n] = rounded(z);
  }
  if (PARTS > 1) cluster_sync();  // until the other CTAs have read this one's sums
}
