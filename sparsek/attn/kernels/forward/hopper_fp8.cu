/* O = softmax(scale Q K^T, where the mask allows) V on Hopper over e4m3: only stored blocks are visited.

    one tile of O                    a step loads into shared memory         and holds in registers
    .------- V_DIM -------.
    |    warpgroup 0      | 64       K [KEYS, DIM]                           S of this step and of the next, float32
    |---------------------|          V [V_DIM, KEYS]                         P = exp2(S - m) in e4m3
    |    warpgroup 1      | 64                                               O [64, V_DIM], float32
    '---------------------'

   Step i of a warpgroup, which has S(i) in registers a, while S(i + 1) -> b may still run:

     exp2, sums and rounding of a            beside S(i + 1)
     wait for S(i + 1), issue P V(i) -> a
     rule and maxima of b                    beside P V(i)
     wait for P V(i), O = O * alpha + a
     issue S(i + 2) -> a

   The next step has a and b exchanged. So the tensor core has a product to compute beside all of the softmax.

   The tensor core sums e4m3 products in about 14 bits and truncates. Q K^T is one such sum over DIM. P V is one over
   the keys of a step only, and is then added to O in float32. That addition also rescales O, so maxima need not lag.

   V lies turned, with its keys in the order in which the accumulators of S hold them, because FP8 wgmma reads both
   operands along the sum: P goes from registers to the next product without a shuffle (attn/mask/quantized_heads.py).

   Scales: those of Q and K times the softmax scale are one factor of a row. With scales of blocks of K or V (BY_BLOCK)
   the producer leaves those of a step in shared memory. O is then in units of the last scale of V, and the factor that
   rescales its rows to new maxima also brings it to the next unit, so no element is multiplied by a scale.

   Two warpgroups take turns at exp2, each warp with the one that shares its quarter of the SM, and pass the turn on
   after three quarters of it. In phase, both would wait for exp2, and leave it idle in the rest of a step.

   Bottleneck (docs/notes/attention-fp8.md): a step of 128 x 128 at DIM 128 is 1024 cycles of tensor core and 1024 of
   exp2, and takes 2,230. Registers: a, b and O fill 192 of 240, so what a step reads once lies in shared memory.

   Capital names that are not defined here are constants of the compilation: Config.defines in hopper_fp8.py. NVRTC
   compiles this file with hopper_ptx.cu in it. */

#define PTX __device__ __forceinline__
typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
#define CLUSTER 1
#define C_COL 0
#define ACT 0

struct alignas(64) TensorMap { u64 opaque[16]; };

// Records of tiles: attn/plan/attention_schedule.py. The first key that query x of head h of item b sees is lo[b *
// bound_item + h / bound_group * bound_head + x]. Query x of head h has the scale q_scale[(b * heads + h) * of_q +
// x / q_rows]. So have keys, and values by their keys; `per_k` and `per_v` are 2^40 over their rows in units of 64.
struct Params {
  const int* tiles; const int* count; const int* partial; const int* full; const int* rules; const int* bits;
  const int* lo; const int* hi; const float* q_scale; const float* k_scale; const float* v_scale;
  float* lse; float* part; float* part_lse;
  i64 per_k, per_v;
  float scale;
  int group, q_len, heads, kv_len, bound_item, bound_head, bound_group, of_q, of_k, of_v, q_rows;
};

constexpr int THREADS = 128 * (GROUPS + 1), CTAS = GROUPS == 1 ? 2 : 1;  // of a CTA; of an SM at least
constexpr int K_WIDE = DIM < 128 ? DIM : 128, PANELS = DIM / K_WIDE;  // bytes of a swizzled row of Q and K; such panels
constexpr int O_WIDE = V_DIM < 64 ? V_DIM : 64, O_BOXES = V_DIM / O_WIDE;  // columns of a box of O
constexpr int FACTORS = BY_BLOCK && PACK == 1 ? 1 : 2;  // of scores; one, a uniform register, if each step has its own
constexpr int SUB = BK / KEYS;                                        // steps of a block
constexpr int WIDE = KEYS / 2, O_REGS = V_DIM / 2;                    // registers of S and of O
// P V takes the place of S, the half of its columns if it is wider, with OWN registers for the others; where it is
// narrower it has registers of its own.
constexpr int OWN = O_REGS == WIDE ? 0 : O_REGS > WIDE ? O_REGS - WIDE : O_REGS, IN_S = O_REGS - OWN;
static_assert(O_REGS <= 2 * WIDE, "halves");
constexpr u32 Q_BYTES = 64 * DIM, K_BYTES = KEYS * DIM, V_BYTES = V_DIM * KEYS, O_BYTES = 128 * V_DIM;  // of a slot
constexpr u32 K_AT = Q_SLOTS * GROUPS * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES, O_AT = V_AT + STAGES * V_BYTES;
constexpr u32 ROW_AT = O_AT + GROUPS * O_BYTES, STEP_AT = ROW_AT + 64 * GROUPS * 16, Q_FULL = STEP_AT + 2 * STAGES * 24;
constexpr u32 Q_EMPTY = Q_FULL + 8 * Q_SLOTS * GROUPS, K_FULL = Q_EMPTY + 8 * Q_SLOTS * GROUPS;
constexpr u32 K_EMPTY = K_FULL + 8 * STAGES, V_FULL = K_EMPTY + 8 * STAGES, V_EMPTY = V_FULL + 8 * STAGES;
constexpr u32 TURN = V_EMPTY + 8 * STAGES, ZERO = TURN + 8 * 4 * GROUPS;
static_assert(ZERO + 16 <= SMEM_BYTES, "hopper_fp8.py counts shared memory differently");
static_assert(Q_BYTES % 1024 == 0 && K_BYTES % 1024 == 0 && V_BYTES % 1024 == 0, "swizzled slots");
static_assert(64 % PACK == 0 && BM % (64 * GROUPS / PACK) == 0 && BK % KEYS == 0, "a tile lies in a block of the mask");
// Whether steps without a rule have a loop of their own: in other shapes two loops spill.
constexpr bool APART = GROUPS == 2 ? V_DIM >= KEYS : V_DIM == KEYS;
constexpr float PEAK = 8.f;      // P is 2^PEAK times the weight: e4m3 goes to 448, and weights to 2^-17 are not zero
constexpr float LEAST = 1e-37f;  // of a row's factor: 0 times a score of -inf would be NaN
constexpr float LOWEST = -1e38f;  // the maximum of a row without a key yet: -inf less it is -inf, not NaN
constexpr float LN2 = 0.6931471805599453f;
constexpr int NOWHERE = 1 << 22;  // a block column beyond every key
constexpr int QUADS = KEYS / 8;  // words of P
constexpr int AHEAD = 3;         // words by which exp2 runs ahead of sums and rounding
constexpr int PASS_AT = GROUPS == 2 ? QUADS * 3 / 4 : 0;  // 0: no turns

#include "../../../products/kernels/spmm/hopper_ptx.cu"

// ---------------------------------------------------------------------------------------------------- PTX wrappers

PTX void load_box(u32 to, const TensorMap& map, u32 landed, int x, int y, int h, int b) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%2, %3, %4, %5}], [%6];"
               ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(h), "r"(b), "r"(landed) : "memory");
}
// Of q and out [B, Hq / PACK, S, PACK, D]: from column x of row y of the first head of pack h on.
PTX void load_rows(u32 to, const TensorMap& map, u32 landed, int x, int y, int h, int b) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%2, %3, %4, %5, %6}], [%7];"
               ::"r"(to), "l"(&map), "r"(x), "r"(0), "r"(y), "r"(h), "r"(b), "r"(landed) : "memory");
}
PTX void store_rows(const TensorMap& map, u32 from, int x, int y, int h, int b) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];"
               ::"l"(&map), "r"(x), "r"(0), "r"(y), "r"(h), "r"(b), "r"(from) : "memory");
}

// 8 bytes of shared memory.
template <class T> PTX void put(u32 at, const T& x) {
  const int2 y = *(const int2*)&x;
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(y.x), "r"(y.y) : "memory");
}
template <class T> PTX T get(u32 at) {
  int2 y;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "r"(at) : "memory");
  return *(T*)&y;
}

#define NAMES_32 TEN() "%10, %11, %12, %13, %14, %15"
#define NAMES_64 THIRTY(, 1, 2) "%30, %31"
#define NAMES_128 THIRTY(, 1, 2) THIRTY(3, 4, 5) "%60, %61, %62, %63"
#define F64(d) F32(d, 0), F32(d, 32)
#define ISSUED(N, NAMES, LEFT, RIGHT, SUMS)                                                                            \
  "{.reg .pred p;\nsetp.ne.b32 p, " SUMS ", 0;\n"                                                                      \
  "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES "}, " LEFT ", " RIGHT ", p, 1, 1;}"

// d[64, N] = (d if `sums`) + A[64, 32] B[N, 32]^T.
template <int N, int W> PTX void multiply(float (&d)[W], u64 a, u64 b, u32 sums) {
  if constexpr (N == 32)
    asm volatile(ISSUED(32, NAMES_32, "%16", "%17", "%18") : F16(d, 0) : "l"(a), "l"(b), "r"(sums));
  else if constexpr (N == 64)
    asm volatile(ISSUED(64, NAMES_64, "%32", "%33", "%34") : F32(d, 0) : "l"(a), "l"(b), "r"(sums));
  else
    asm volatile(ISSUED(128, NAMES_128, "%64", "%65", "%66") : F64(d) : "l"(a), "l"(b), "r"(sums));
}
// The same with A in registers.
template <int N, int W> PTX void multiply(float (&d)[W], const u32* a, u64 b, u32 sums) {
#define IN : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(sums)
  if constexpr (N == 32)
    asm volatile(ISSUED(32, NAMES_32, "{%16, %17, %18, %19}", "%20", "%21") : F16(d, 0) IN);
  else if constexpr (N == 64)
    asm volatile(ISSUED(64, NAMES_64, "{%32, %33, %34, %35}", "%36", "%37") : F32(d, 0) IN);
  else
    asm volatile(ISSUED(128, NAMES_128, "{%64, %65, %66, %67}", "%68", "%69") : F64(d) IN);
}

// Four weights of a row in a register.
PTX u32 round_four(float a, float b, float c, float d) {
  u32 x;
  asm volatile("{.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
               "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};}"
               : "=r"(x) : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}
// threadIdx.x, read where it is needed: steps leave no registers for what comes of it.
PTX int thread_now() { int x; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x)); return x; }
// In the order in which they stand: ptxas would otherwise move some behind the next wait.
PTX float exp2_here(float x) { asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x)); return x; }
// Nothing, for `yes` is false. ptxas moves no instruction over this loop.
PTX void stay(bool yes) { while (yes) asm volatile("nanosleep.u32 100;" ::: "memory"); }
PTX float log2_of(float x) { asm("lg2.approx.f32 %0, %0;" : "+f"(x)); return x; }
PTX float over(float x, float y) { asm("div.full.f32 %0, %0, %1;" : "+f"(x) : "f"(y)); return x; }
// The largest of the four threads that share a row, and their sum.
PTX float quad_max(float x) { x = fmaxf(x, __shfl_xor_sync(~0u, x, 1)); return fmaxf(x, __shfl_xor_sync(~0u, x, 2)); }
PTX float quad_sum(float x) { x += __shfl_xor_sync(~0u, x, 1); return x + __shfl_xor_sync(~0u, x, 2); }

// The producer's warpgroup releases registers, a consumer takes them.
PTX void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
PTX void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 240 : 232)); }

// ---------------------------------------------------------------------------------------------------- tiles and roles

constexpr u64 K_DESC = described(8 * K_WIDE, 16, K_WIDE), V_DESC = described(8 * KEYS, 16, KEYS);
// The descriptor of what lies at an address. ptxas would compute it anew in every step, but not a shuffle.
PTX u64 placed(u64 desc, u32 at) { return desc >> 32 << 32 | __shfl_sync(~0u, (u32)(desc | place(at)), 0); }
#define NINF __int_as_float(0xff800000)

// What consumers must know of a step, for steps leave them no registers: its first key and the rule of its block; the
// scale of its keys, and what brings O to its unit; that unit.
struct alignas(8) Block { int key, rule; };
struct alignas(8) Scales { float k, ratio; };
struct alignas(8) Unit { float v; int none; };
// And of a row: the keys it sees; its factor of scores, and its words in a rule of bits.
struct alignas(8) Bounds { int lo, hi; };
struct alignas(8) Row { float factor; int words; };

// 0, which no compiler knows.
PTX u32 get_zero(u32 smem) { return (u32)get<Block>(smem + ZERO).key; }
// Step n of a CTA, over all of its tiles, has slot n % STAGES of K and V.
PTX u32 slot_of(u32 n) { return n % STAGES; }
PTX u32 phase_of(u32 n) { return n / STAGES & 1; }
// A step is read until its exp2, which is before the arrival at k_empty of the next step: so twice as many are kept.
PTX u32 step_at(u32 smem, u32 n) { return smem + STEP_AT + n % (2 * STAGES) * 24; }
PTX u32 row_at(u32 smem, int row) { return smem + ROW_AT + row * 16; }
// A thread's first row of a tile; 8 more is its other one.
PTX int own_row(int thread) { return thread / 32 * 16 - 64 + thread % 32 / 4; }
// Tile number `tile` of a CTA: slot of Q of warpgroup wg, and its phase.
PTX u32 q_slot(u32 tile, int wg) { return tile % Q_SLOTS * GROUPS + wg; }
PTX u32 q_phase(u32 tile) { return tile / Q_SLOTS & 1; }

struct Tile { int pos, b, h, p_begin, masked, f_begin, steps, part; };
PTX Tile tile_at(const Params& p, int t) {
  const int4 x = ((const int4*)p.tiles)[2 * t], y = ((const int4*)p.tiles)[2 * t + 1];
  return {x.x, x.y, x.z, x.w, y.x * SUB, y.y, (y.x + y.z) * SUB, y.w};
}

// The scale of a key: one for `per`, see Params.
PTX float scale_of_key(const float* scales, i64 per, int key) { return scales[(int)((key >> 6) * per >> 40)]; }

// What brings O from its unit to that of a step with the scale v. A sum in units is less than 2^46 times the largest
// scale: where v is below 2^-80 of that, O would overflow, so it keeps the unit, P counts as 0, and this is -1.
PTX float next_unit(float& unit, float& most, float v, bool first) {
  const float before = first ? v : unit;
  most = first ? v : fmaxf(most, v);
  const bool far = v * 0x1p80f < most;
  unit = far ? before : v;
  return far ? -1.f : over(before, v);
}

// Producer warp: Q of every tile, then K and V of its steps, and what else consumers need of those.
PTX void load(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const Params& p, u32 smem) {
  const int count = *p.count;
  u32 n = 0, tile = 0;
  for (int t = blockIdx.x; t < count; t += gridDim.x, tile++) {
    const Tile r = tile_at(p, t);
    for (int wg = 0; wg < GROUPS; wg++) {
      const u32 slot = q_slot(tile, wg), full = smem + Q_FULL + 8 * slot;
      barrier_wait(smem + Q_EMPTY + 8 * slot, q_phase(tile) ^ 1);  // until the warpgroup is done with the slot's Q
      if (!elected()) continue;
      barrier_expect(full, Q_BYTES);
      const int pos = r.pos + 64 / PACK * wg;
      for (int x = 0; x < PANELS; x++)
        load_rows(smem + slot * Q_BYTES + x * 64 * K_WIDE, q_map, full, x * K_WIDE, pos, r.h / PACK, r.b);
    }
    const int kv = r.h / p.group, head = r.b * (p.heads / p.group) + kv;
    float unit = 0.f, most = 0.f;
    for (int i = 0; i < r.steps; i++, n++) {
      const bool ruled = i < r.masked, none = ruled && r.p_begin < 0;  // a tile without blocks has a step without one
      const int at = ruled ? r.p_begin + i / SUB : r.f_begin + (i - r.masked) / SUB;
      const int key = none ? NOWHERE * BK : (ruled ? p.partial : p.full)[at] * BK + i % SUB * KEYS;
      const int rule = BITS && ruled && !none ? p.rules[at] : -1;
      Scales scales;
      if (BY_BLOCK) {
        const int there = min(key, p.kv_len - 1);
        const float v = scale_of_key(p.v_scale + head * p.of_v, p.per_v, there);
        scales.k = scale_of_key(p.k_scale + head * p.of_k, p.per_k, there);
        scales.ratio = next_unit(unit, most, v, i == 0);
      }
      const u32 slot = slot_of(n), empty = phase_of(n) ^ 1;
      const u32 k_full = smem + K_FULL + 8 * slot, v_full = smem + V_FULL + 8 * slot;
      barrier_wait(smem + K_EMPTY + 8 * slot, empty);  // until every warp has multiplied the K in this slot
      if (elected()) {
        if (ruled) put(step_at(smem, n), Block{key, rule});
        if (BY_BLOCK) put(step_at(smem, n) + 8, scales), put(step_at(smem, n) + 16, Unit{unit, 0});
        barrier_expect(k_full, K_BYTES);
        for (int x = 0; x < PANELS; x++)
          load_box(smem + K_AT + slot * K_BYTES + x * KEYS * K_WIDE, k_map, k_full, x * K_WIDE, key, kv, r.b);
      }
      barrier_wait(smem + V_EMPTY + 8 * slot, empty);  // and the V
      if (elected()) {
        barrier_expect(v_full, V_BYTES);
        load_box(smem + V_AT + slot * V_BYTES, v_map, v_full, key, 0, kv, r.b);
      }
    }
  }
}

struct Rows { float of[2]; };  // of a thread's two rows, lane / 4 and 8 more of the 16 of its warp

// What a warpgroup knows of its tile and of its place in it.
struct Walk {
  u32 smem, n;  // n: the step whose exp2 comes next
  u32 zero;     // 0
  u32 ruled;    // the first step without a rule
  int wg, warp;
  bool speaks;  // lane 0, which arrives for its warp
  u32 q; u64 k, v;  // descriptors: the lower word of that of Q; those of slot 0 of K and V
  float scale[FACTORS];  // of scores
  float factor;          // of them without the scale of keys
};

// Maxima less PEAK, in base 2; sums of weights; what the newest maxima leave of earlier sums.
struct Sums { Rows m, l, kept; };

// A word with 1 from bit `first` on: everywhere if that is below 0, nowhere if it is above 31.
PTX u32 bits_from(int first) { u32 x; asm("shl.b32 %0, -1, %1;" : "=r"(x) : "r"(max(first, 0))); return x; }

// Scores of a thread's row h whose bit is 1, -inf elsewhere: words of 32 keys each, from the thread's first key on.
PTX void by_words(float (&d)[WIDE], int h, const u32 (&words)[KEYS / 32]) {
#pragma unroll
  for (int j = 0; j < KEYS / 4; j++) {
    asm("{.reg .pred p; .reg .b32 x;\nand.b32 x, %1, %2;\nsetp.ne.b32 p, x, 0;\nselp.f32 %0, %0, 0fFF800000, p;}"
        : "+f"(d[4 * (j / 2) + 2 * h + j % 2]) : "r"(words[j / 8]), "r"(1 << 8 * (j / 2 % 4) + j % 2));
  }
}

// Maxima of S of step n after its rule; and with them what its exp2 needs.
template <bool FIRST, bool RULED = true> PTX void maxima(float (&d)[WIDE], Walk& w, Sums& s, const int* bits, u32 n) {
  if (RULED && n < w.ruled) {
    const Block block = get<Block>(step_at(w.smem, n));
    const int thread = thread_now(), quarter = thread % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 row = row_at(w.smem, own_row(thread) + 8 * h);
      u32 words[KEYS / 32];
      const int word = get<Row>(row + 8).words + block.key % BK / 32;
      const int* stored = bits + (i64)max(block.rule, 0) * (BM * BK / 32) + word;
      const Bounds seen = get<Bounds>(row);
      const int first = block.key + 2 * quarter;
#pragma unroll
      for (int k = 0; k < KEYS / 32; k++)
        words[k] = BITS && block.rule >= 0 ? (u32)stored[k] >> 2 * quarter
                 : (INTERVAL ? bits_from(seen.lo - first - 32 * k) : ~0u) & ~bits_from(seen.hi - first - 32 * k);
      by_words(d, h, words);
    }
  }
  if (BY_BLOCK) {
    const float k = get<Scales>(step_at(w.smem, n) + 8).k;
    const u32 row = row_at(w.smem, own_row(thread_now())) + 8;
#pragma unroll
    for (int h = 0; h < FACTORS; h++)
      w.scale[h] = fmaxf((FACTORS == 1 ? w.factor : get<Row>(row + 128 * h).factor) * k, LEAST);
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float top[4];  // four chains: one would wait for itself
#pragma unroll
    for (int j = 0; j < 4; j++) {
      top[j] = fmaxf(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
#pragma unroll
      for (int k = 1; k < KEYS / 32; k++)
        top[j] = fmaxf(top[j], fmaxf(d[4 * (j + 4 * k) + 2 * h], d[4 * (j + 4 * k) + 2 * h + 1]));
    }
    const float t = quad_max(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3])));
    const float m = fmaxf(fmaf(t, w.scale[h % FACTORS], -PEAK), FIRST ? LOWEST : s.m.of[h]);
    s.kept.of[h] = FIRST ? 0.f : exp2_of(s.m.of[h] - m);
    s.m.of[h] = m;
  }
}

// exp2 of S, its sums, and P. Returns 0, which depends on all of exp2: ptxas would move barriers before it.
PTX u32 exponentials(float (&d)[WIDE], u32 (&p)[QUADS], const Walk& w, Sums& s) {
  float shift[2] = {s.m.of[0], s.m.of[1]}, sum[2] = {}, e[AHEAD + 1][4];
  if (PASS_AT) {
    // Until the other warpgroup's warp has had its turn. Warpgroup 0 begins: at a barrier's phase before its first.
    barrier_wait(w.smem + TURN + 8 * (4 * w.wg + w.warp), (w.n & 1) ^ (1 - w.wg));
    const float zero = __uint_as_float(get_zero(w.smem));  // ptxas moves arithmetic in front of a wait
    shift[0] += zero, shift[1] += zero;
  }
#pragma unroll
  for (int x = 0; x < QUADS + AHEAD; x++) {
    const int h = x % 2, y = x - AHEAD;
    float *begun = e[x % (AHEAD + 1)], *due = e[(x + 1) % (AHEAD + 1)];
#pragma unroll
    for (int k = 0; x < QUADS && k < 4; k++)
      begun[k] = exp2_here(fmaf(d[4 * (x - h + k / 2) + 2 * h + k % 2], w.scale[h % FACTORS], -shift[h]));
    if (PASS_AT > 0 && x == PASS_AT - 1) {
      u32 ran = __float_as_uint(sum[0]) | __float_as_uint(sum[1]);
#pragma unroll
      for (int k = 0; k <= AHEAD; k++) ran |= __float_as_uint(e[k][3]);
      if (w.speaks) barrier_arrive(w.smem + TURN + 8 * (4 * (w.wg ^ 1) + w.warp) + (ran & w.zero), 0);
    }
    if (y < 0) continue;
    sum[y % 2] = sum[y % 2] + due[0] + due[1] + due[2] + due[3];
    p[y] = round_four(due[0], due[1], due[2], due[3]);
  }
  s.l.of[0] = s.l.of[0] * s.kept.of[0] + sum[0], s.l.of[1] = s.l.of[1] * s.kept.of[1] + sum[1];
  return (__float_as_uint(sum[0]) | __float_as_uint(sum[1])) & w.zero;
}

// S of step n. `zero` as a number would let the compiler give S other registers than those of d, and copy.
PTX void issue_scores(float (&d)[WIDE], const Walk& w, u32 n) {
  const u64 k = w.k + slot_of(n) * (K_BYTES >> 4);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < DIM / 32; i++) {
    const u32 panel = i / 4 * K_WIDE, within = i % 4 * 32;
    const u64 q = K_DESC | w.q + ((panel * 64 + within) >> 4);
    multiply<KEYS>(d, q, k + ((panel * KEYS + within) >> 4), i ? 1 : w.zero);
  }
  wgmma_commit();
}

// P V, of the V whose descriptor is v.
PTX void issue_values(float (&d)[WIDE], float (&own)[OWN + 1], const u32 (&p)[QUADS], const Walk& w, u64 v) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < KEYS / 32; i++) {
    if constexpr (IN_S > 0) multiply<2 * IN_S>(d, p + 4 * i, v + 2 * i, i ? 1 : w.zero);
    if constexpr (OWN > 0) multiply<2 * OWN>(own, p + 4 * i, v + 2 * i + (2 * IN_S * KEYS >> 4), i ? 1 : w.zero);
  }
  wgmma_commit();
}

// Marks N results as written here, after the wait for them.
template <int N, int W> PTX void landed(float (&d)[W]) {
#pragma unroll
  for (int i = 0; i < N; i++) written_until_here(d[i]);
}

// Step n, with its S in a, and that of the next step in b or on its way. LEFT: steps of the tile after it; 2: or more.
template <int LEFT, bool RULED = true>
PTX void step(float (&a)[WIDE], float (&b)[WIDE], float (&own)[OWN + 1], float (&o)[O_REGS], Walk& w, Sums& s,
              const int* bits) {
  u32 p[QUADS];
  u64 v = w.v + slot_of(w.n) * (V_BYTES >> 4);
  asm volatile("" : "+l"(v));  // computed here, not between the wait for V and its product
  const u32 slot = slot_of(w.n), done = exponentials(a, p, w, s);
  const float ratio = BY_BLOCK ? get<Scales>(step_at(w.smem, w.n) + 8).ratio : 1.f;
  barrier_wait(w.smem + V_FULL + 8 * slot + done, phase_of(w.n));  // until V has landed
  if (LEFT > 0) {  // S of the next step had the whole of exp2; two groups in flight would be serialized (C7514)
    wgmma_wait<0>();
    landed<WIDE>(b);
    if (w.speaks) barrier_arrive(w.smem + K_EMPTY + 8 * slot_of(w.n + 1), 0);
  }
  // Where the scale of V is far below others, P counts as 0.
#pragma unroll
  for (int j = 0; BY_BLOCK && j < QUADS; j++) p[j] &= ~(u32)((int)__float_as_uint(ratio) >> 31);
  issue_values(a, own, p, w, v);
  if (LEFT == 2 && !RULED) stay(w.n + 1 < w.ruled);  // ptxas would issue some products behind maxima
  const float alpha[2] = {s.kept.of[0] * fabsf(ratio), s.kept.of[1] * fabsf(ratio)};
  if (LEFT > 0) maxima<false, RULED>(b, w, s, bits, w.n + 1);
  if (LEFT > 1) barrier_wait(w.smem + K_FULL + 8 * slot_of(w.n + 2), phase_of(w.n + 2));  // until that K has landed
  wgmma_wait<0>();
  landed<IN_S>(a), landed<OWN>(own);
  if (w.speaks) barrier_arrive(w.smem + V_EMPTY + 8 * slot, 0);
#pragma unroll
  for (int j = 0; j < O_REGS; j++) o[j] = fmaf(o[j], alpha[j / 2 % 2], j < IN_S ? a[j] : own[j - IN_S]);
  if (LEFT > 1) issue_scores(a, w, w.n + 2);
  w.n++;
}

// The steps of a tile up to `end`, at least one.
PTX void attended(float (&o)[O_REGS], Walk& w, Sums& s, const int* bits, u32 end) {
  float a[WIDE] = {}, b[WIDE] = {}, own[OWN + 1] = {};
  barrier_wait(w.smem + K_FULL + 8 * slot_of(w.n), phase_of(w.n));  // until the first K has landed
  issue_scores(a, w, w.n);
  wgmma_wait<0>();
  landed<WIDE>(a);
  if (w.speaks) barrier_arrive(w.smem + K_EMPTY + 8 * slot_of(w.n), 0);
  landed<WIDE>(b);
  if (w.n + 1 < end) {
    barrier_wait(w.smem + K_FULL + 8 * slot_of(w.n + 1), phase_of(w.n + 1));  // and the second
    issue_scores(b, w, w.n + 1);
  }
  s.l.of[0] = s.l.of[1] = 0.f;
  maxima<true>(a, w, s, bits, w.n);
#pragma unroll
  for (int j = 0; j < O_REGS; j++) o[j] = 0.f;
#pragma unroll 1
  while (w.n + 3 < end && (!APART || w.n + 1 < w.ruled)) {
    step<2>(a, b, own, o, w, s, bits);
    step<2>(b, a, own, o, w, s, bits);
  }
#pragma unroll 1
  while (APART && w.n + 3 < end) {
    step<2, false>(a, b, own, o, w, s, bits);
    step<2, false>(b, a, own, o, w, s, bits);
  }
  if (w.n + 3 == end) {
    step<2>(a, b, own, o, w, s, bits);
    step<1>(b, a, own, o, w, s, bits);
    step<0>(a, b, own, o, w, s, bits);
  } else if (w.n + 2 == end) {
    step<1>(a, b, own, o, w, s, bits);
    step<0>(b, a, own, o, w, s, bits);
  } else step<0>(a, b, own, o, w, s, bits);
}

// Rounds the rows of O, times `divided`, into the warpgroup's boxes [64, O_WIDE] at `stage`, as TMA swizzles them.
PTX void stage_rows(u32 stage, const float (&o)[O_REGS], const Rows& divided, int thread) {
#pragma unroll
  for (int g = 0; g < V_DIM / 16; g++) {  // 16 columns: two 8 x 8 matrices of each half of the rows
    const int line = thread % 128 / 32 * 16 + thread % 16, across = thread % 32 / 16;
    const int turned = O_WIDE == 64 ? line & 7 : line / 2 & 3;
    const u32 at = stage + g / 4 * (128 * O_WIDE) + line * (2 * O_WIDE) + (((2 * (g % 4) + across) ^ turned) << 4);
    float e[8];
#pragma unroll
    for (int j = 0; j < 8; j++) e[j] = o[8 * g + j] * divided.of[j / 2 % 2];
    store_matrix(at, round_pair(e[0], e[1]), round_pair(e[2], e[3]), round_pair(e[4], e[5]), round_pair(e[6], e[7]));
  }
}

// What a warpgroup must know of tile r before its steps.
PTX void enter(Walk& w, const Params& p, const Tile& r) {
  const int thread = thread_now(), first = own_row(thread);
  const int kv = r.b * (p.heads / p.group) + r.h / p.group;
  const i64 bound = (i64)r.b * p.bound_item + r.h / p.bound_group * p.bound_head;
  w.ruled = w.n + r.masked;
  if (FACTORS == 1)  // rows beyond the last query have that of the last
    w.factor = p.q_scale[(r.b * p.heads + r.h) * p.of_q + min(r.pos + 64 * w.wg, p.q_len - 1) / p.q_rows] * p.scale;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int row = first + 8 * k, at = r.pos + row / PACK;
    const bool there = at < p.q_len;
    const float* of_row = p.q_scale + (r.b * p.heads + r.h + row % PACK) * p.of_q + at / p.q_rows;
    Bounds seen = {0, p.kv_len};
    if (INTERVAL) seen = there ? Bounds{p.lo[bound + at], p.hi[bound + at]} : Bounds{0, 0};
    const Row own = {(FACTORS == 2 && there ? *of_row : 1.f) * p.scale, at % BM * (BK / 32)};
    if (!BY_BLOCK) w.scale[k % FACTORS] = fmaxf(own.factor * p.k_scale[kv], LEAST);
    if (thread % 4 == 0) put(row_at(w.smem, row), seen), put(row_at(w.smem, row) + 8, own);
  }
  __syncwarp();  // until the rows are there for the four threads of each
}

// Writes lse of a thread's rows of tile r, or of its part. What their O is to be multiplied by.
PTX Rows finished(const Params& p, const Tile& r, const Sums& s, float unit, int first, int quarter) {
  Rows divided;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int row = first + 8 * k, at = r.pos + row / PACK;
    const float l = quad_sum(s.l.of[k]), lse = l != 0.f ? s.m.of[k] + log2_of(l) : NINF;
    divided.of[k] = l != 0.f ? over(unit, l) : 0.f;
    if (quarter) continue;
    if (SPLIT && r.part >= 0) p.part_lse[(i64)r.part * 128 + row] = lse;
    else if (LSE && at < p.q_len) p.lse[((i64)r.b * p.heads + r.h + row % PACK) * p.q_len + at] = lse * LN2;
  }
  return divided;
}

// A consumer warpgroup: its 64 rows of every tile.
PTX void attend(const TensorMap& o_map, const Params& p, u32 smem, int wg) {
  Walk w;
  w.smem = smem, w.n = 0, w.wg = wg, w.zero = get_zero(smem);
  w.k = placed(K_DESC, smem + K_AT), w.v = placed(V_DESC, smem + V_AT);
  w.warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4, w.speaks = threadIdx.x % 32 == 0;
#pragma unroll 1
  for (int t = blockIdx.x, tile = 0; t < *p.count; t += gridDim.x, tile++) {
    const u32 slot = q_slot(tile, wg), stage = smem + O_AT + wg * O_BYTES;
    Tile r = tile_at(p, t);
    enter(w, p, r);
    barrier_wait(smem + Q_FULL + 8 * slot, q_phase(tile));  // until Q has landed
    w.q = (u32)placed(K_DESC, smem + slot * Q_BYTES);
    float o[O_REGS];
    Sums s;
    attended(o, w, s, p.bits, w.n + r.steps);
    if (w.speaks) barrier_arrive(smem + Q_EMPTY + 8 * slot, 0);
    r = tile_at(p, t);  // again: registers have no room for it
    const int thread = thread_now(), first = own_row(thread);
    const int kv = r.b * (p.heads / p.group) + r.h / p.group;
    const float unit = BY_BLOCK ? get<Unit>(step_at(smem, w.n - 1) + 16).v : p.v_scale[kv];  // of O
    const Rows divided = finished(p, r, s, unit, first, thread % 4);
    if (SPLIT && r.part >= 0) {
#pragma unroll
      for (int j = 0; j < V_DIM / 4; j++) {
        float* at = p.part + ((i64)r.part * 128 + first + 8 * (j % 2)) * V_DIM + 8 * (j / 2) + 2 * (thread % 4);
        *(float2*)at = {o[2 * j] * divided.of[j % 2], o[2 * j + 1] * divided.of[j % 2]};
      }
      continue;
    }
    const bool leader = thread % 128 == 0;
    if (leader) tma_store_wait();  // until TMA has read the previous O
    warpgroup_sync(wg);
    stage_rows(stage, o, divided, thread);
    fence_proxy();  // TMA will read what was just written
    warpgroup_sync(wg);
    if (!leader) continue;
    for (int x = 0; x < O_BOXES; x++)
      store_rows(o_map, stage + x * (128 * O_WIDE), x * O_WIDE, r.pos + 64 / PACK * wg, r.h / PACK, r.b);
    tma_store_commit();
  }
  tma_store_wait();  // shared memory must outlive the copies that read it
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    attention_fp8_kernel(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                         const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap o_map,
                         const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = (u32)__cvta_generic_to_shared(shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    if (smem % 1024) __trap();
    for (int i = 0; i < Q_SLOTS * GROUPS; i++) {
      barrier_init(smem + Q_FULL + 8 * i, 1);
      barrier_init(smem + Q_EMPTY + 8 * i, 4);  // one lane of every warp of its warpgroup
    }
    for (int i = 0; i < STAGES; i++) {
      barrier_init(smem + K_FULL + 8 * i, 1), barrier_init(smem + V_FULL + 8 * i, 1);
      barrier_init(smem + K_EMPTY + 8 * i, 4 * GROUPS), barrier_init(smem + V_EMPTY + 8 * i, 4 * GROUPS);
    }
    for (int i = 0; i < 4 * GROUPS; i++) barrier_init(smem + TURN + 8 * i, 1);  // one lane of a warp
    put(smem + ZERO, Block{0, 0});
    barriers_made();
  }
  cluster_sync();  // until the barriers are initialised
  if (group == 0) {
    give_registers();
    if (threadIdx.x < 32) load(q_map, k_map, v_map, p, smem);
  } else {
    take_registers();
    attend(o_map, p, smem, GROUPS == 1 ? 0 : group - 1);
  }
}
