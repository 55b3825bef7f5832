"""PTX of the activations that Hopper's products apply in float32, and of their slopes.

    y = z s,  s = sigmoid(2 u)        slope = dy/dz = s + 2 u' (y - y s)

u depends on the activation. The tanh form of GELU and SiLU are sigmoids exactly. GELU's distribution function is
fitted. For bf16: u = z (a + b z^2), with an error of y of at most 2.8e-4 and of the slope of at most 8.8e-4. For fp16:
with a term of z^5, at most 2.6e-5 and 1.1e-4. For bf16 the sigmoid is one instruction with an error of at most 2^-12;
for fp16 it is accurate to float32.

The PTX handles one element. As operations on tensors, all first steps of a tile would come before all second steps and
spill.
"""

from triton.experimental import gluon


@gluon.constexpr_function
def activation_ptx(name: str, half: bool) -> str:
    """PTX of y ($0) from z ($1); `half`: for fp16."""
    terms = _terms(name, half)
    if not terms:
        inner = "mul.f32 u, $1, 0.5;"
    elif len(terms) == 3:
        inner = (
            f"min.f32 u, $1, 6.0; max.f32 u, u, -6.0; mul.f32 s, u, u; {_polynomial(terms)} mul.f32 u, u, p;"
        )
    else:
        inner = f"mul.f32 s, $1, $1; {_polynomial(terms)} mul.f32 u, $1, p;"
    return f"{{.reg .f32 u, s, p; {inner} {_sigmoid(half)} mul.f32 $0, $1, u;}}"


@gluon.constexpr_function
def slope_ptx(name: str, half: bool) -> str:
    """PTX of y ($0) and its slope ($1) from z ($2); `half`: for fp16. A NaN stays NaN in both.

    z^2 is bounded where the sigmoid is 0 or 1, or a large z would become 0 times infinity.
    """
    terms = _terms(name, half)
    if not terms:
        inner = "mul.f32 u, $2, 0.5; mov.f32 p, 1.0;"
    else:
        most = 36.0 if len(terms) == 3 else 64.0
        slopes = [(4 * i + 2) * term for i, term in enumerate(terms)]  # 2 u', for u = a z + b z^3 + c z^5
        inner = (
            f"mul.f32 s, $2, $2; min.f32 s, s, {most}; {_polynomial(terms)} mul.f32 u, $2, p; "
            f"{_polynomial(slopes)}"
        )
    slope = "neg.f32 s, y; fma.rn.f32 s, s, u, y; fma.rn.f32 $1, p, s, u;"
    return f"{{.reg .f32 u, s, p, y; {inner} {_sigmoid(half)} mul.f32 y, $2, u; mov.f32 $0, y; {slope}}}"


@gluon.constexpr_function
def _terms(name: str, half: bool) -> list[float]:
    """u / z as a polynomial of z^2; [] for SiLU, where it is a half."""
    if name == "silu":
        return []
    if name == "gelu_tanh":
        return [0.79788456, 0.035677408]  # sqrt(2 / pi) and 0.044715 of it
    if half:
        return [0.79750788, 0.03700565, -0.00035151683]  # up to |z| = 6
    return [0.80015708, 0.034700893]


@gluon.constexpr_function
def _sigmoid(half: bool) -> str:
    """PTX of u = sigmoid(2 u)."""
    if half:
        return "mul.f32 u, u, -2.88539; ex2.approx.ftz.f32 u, u; add.f32 u, u, 1.0; rcp.approx.ftz.f32 u, u;"
    return "tanh.approx.f32 u, u; fma.rn.f32 u, u, 0.5, 0.5;"


@gluon.constexpr_function
def _polynomial(terms: list[float]) -> str:
    """PTX of p = terms[0] + terms[1] s + terms[2] s^2."""
    steps = f"fma.rn.f32 p, s, {terms[-1]}, {terms[-2]};"
    for term in terms[-3::-1]:
        steps += f" fma.rn.f32 p, s, p, {term};"
    return steps
