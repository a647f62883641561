// A Mixture-of-Experts layer from Rust, on the GPU if there is one, else on the CPU, compared with a naive one.
mod cumoe;
use cumoe::*;
use cumoe_sys::*;

const TOKENS: usize = 6;
const HIDDEN: usize = 32;
const INTER: usize = 24;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;

/// Numbers between -limit and limit.
fn numbers(count: usize, limit: f32, mut seed: u32) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
        ((seed >> 8) as f32 / 8388608.0 - 1.0) * limit
    };
    (0..count).map(|_| next()).collect()
}

struct Model {
    x: Vec<f32>,
    router: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn naive_token(m: &Model, x: &[f32]) -> Vec<f64> {
    let scores: Vec<f64> = m.router.chunks(HIDDEN).map(|row| dot(row, x).exp()).collect();
    let mut order: Vec<usize> = (0..EXPERTS).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let total: f64 = order[..TOP_K].iter().map(|e| scores[*e]).sum();
    let mut out = vec![0f64; HIDDEN];
    for &e in &order[..TOP_K] {
        let rows = m.gate_up.chunks(HIDDEN).skip(e * 2 * INTER).take(2 * INTER);
        let gate_up: Vec<f64> = rows.map(|row| dot(row, x)).collect();
        let silu = |v: f64| v / (1.0 + (-v).exp());
        let h: Vec<f32> = (0..INTER).map(|i| (silu(gate_up[i]) * gate_up[INTER + i]) as f32).collect();
        for (o, row) in m.down.chunks(INTER).skip(e * HIDDEN).take(HIDDEN).enumerate() {
            out[o] += scores[e] / total * dot(row, &h);
        }
    }
    out
}

fn layer(context: &Context, m: &Model) -> Result<Vec<f32>, Error> {
    let desc = cumoe_moe_desc {
        size: size_of_struct::<cumoe_moe_desc>(),
        num_experts: EXPERTS as i32,
        hidden: HIDDEN as i32,
        inter: INTER as i32,
        dtype: CUMOE_F32,
        routing: cumoe_routing { top_k: TOP_K as i32, flags: CUMOE_ROUTE_RENORMALIZE, ..Default::default() },
        ..Default::default()
    };
    let plan = context.plan(&desc)?;
    let (gate_up, down) = (context.matrix(&m.gate_up, HIDDEN)?, context.matrix(&m.down, INTER)?);
    let weights = context.bind(&cumoe_weights_desc {
        size: size_of_struct::<cumoe_weights_desc>(),
        experts: desc.num_experts,
        hidden: desc.hidden,
        inter: desc.inter,
        gate_order: CUMOE_GATE_UP_CONCAT,
        up_major: CUMOE_OUT_IN,
        down_major: CUMOE_OUT_IN,
        gate_up: cumoe_projection { data: gate_up.input(), ..Default::default() },
        down: cumoe_projection { data: down.input(), ..Default::default() },
        ..Default::default()
    })?;
    let (x, router) = (context.matrix(&m.x, HIDDEN)?, context.matrix(&m.router, HIDDEN)?);
    let out = context.buffer(CUMOE_F32, TOKENS, HIDDEN)?;
    let workspace = context.buffer(CUMOE_U8, 1, plan.workspace(TOKENS)?)?;
    let args = cumoe_moe_args {
        size: size_of_struct::<cumoe_moe_args>(),
        x: x.input(),
        router_weight: router.input(),
        out: out.view(),
        workspace: workspace.view(),
        ..Default::default()
    };
    plan.forward(&weights, &args)?;
    out.values()
}

fn main() -> Result<(), Error> {
    let m = Model {
        x: numbers(TOKENS * HIDDEN, 1.0, 1),
        router: numbers(EXPERTS * HIDDEN, 0.3, 2),
        gate_up: numbers(EXPERTS * 2 * INTER * HIDDEN, 0.3, 3),
        down: numbers(EXPERTS * HIDDEN * INTER, 0.3, 4),
    };
    let context = Context::open(CUMOE_DEVICE_AUTO)?;
    let got = layer(&context, &m)?;
    let mut worst = 0f64;
    for (x, row) in m.x.chunks(HIDDEN).zip(got.chunks(HIDDEN)) {
        for (want, got) in naive_token(&m, x).iter().zip(row) {
            worst = worst.max((want - f64::from(*got)).abs());
        }
    }
    println!("machine code for {}; largest difference {worst:.2e}", architectures());
    assert!(worst < 1e-5);

    // What the compiler cannot forbid, a view that outlives its buffer, is a status.
    let stale = context.matrix(&m.x, HIDDEN)?.view();
    let error = Buffer::read(&context, stale).unwrap_err();
    assert_eq!(error.status, CUMOE_ERR_STALE_HANDLE);
    println!("{}", error.text);
    Ok(())
}
