// A Mixture-of-Experts layer from Rust, on the GPU if there is one, else on the CPU, compared with a naive one.
mod cumoe;
use cumoe::*;
use std::mem::size_of;

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
    let routing = Routing {
        top_k: TOP_K as i32,
        flags: ROUTE_RENORMALIZE,
        ..Routing::default()
    };
    let desc = MoeDesc {
        size: size_of::<MoeDesc>() as u32,
        num_experts: EXPERTS as i32,
        hidden: HIDDEN as i32,
        inter: INTER as i32,
        dtype: F32,
        routing,
        ..MoeDesc::default()
    };
    let plan = context.plan(&desc)?;
    let (gate_up, down) = (context.matrix(&m.gate_up, HIDDEN)?, context.matrix(&m.down, INTER)?);
    let weights = context.bind(&WeightsDesc {
        size: size_of::<WeightsDesc>() as u32,
        experts: desc.num_experts,
        hidden: desc.hidden,
        inter: desc.inter,
        gate_order: GATE_UP_CONCAT,
        up_major: OUT_IN,
        down_major: OUT_IN,
        reserved: 0,
        gate_up: Projection { data: gate_up.view(), ..NO_PROJECTION },
        gate: NO_PROJECTION,
        up: NO_PROJECTION,
        down: Projection { data: down.view(), ..NO_PROJECTION },
        up_format: Format::default(),
        down_format: Format::default(),
        dtype: 0,
        reserved_end: 0,
    })?;
    let (x, router) = (context.matrix(&m.x, HIDDEN)?, context.matrix(&m.router, HIDDEN)?);
    let out = context.buffer(F32, TOKENS, HIDDEN)?;
    let workspace = context.buffer(U8, 1, plan.workspace(TOKENS)?)?;
    let args = MoeArgs {
        size: size_of::<MoeArgs>() as u32,
        flags: 0,
        x: x.view(),
        router_weight: router.view(),
        out: out.view(),
        workspace: workspace.view(),
        shared: std::ptr::null_mut(),
        out_scale: 0.0,
        reserved: 0,
        device_tokens: ABSENT,
        router_bias: ABSENT,
        logits: ABSENT,
        ids: ABSENT,
        weights: ABSENT,
        select_bias: ABSENT,
        expert_map: ABSENT,
        shared_gate: ABSENT,
        residual: ABSENT,
        ids_out: ABSENT,
        weights_out: ABSENT,
        counts_out: ABSENT,
        load: ABSENT,
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
    let context = Context::open(DEVICE_AUTO)?;
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
    assert_eq!(error.status, ERR_STALE_HANDLE);
    println!("{}", error.text);
    Ok(())
}
