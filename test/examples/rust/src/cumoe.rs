// What of cumoe's C interface this program uses, declared by hand, and owners that clean up after themselves.
use std::ffi::{c_char, c_int, c_void, CStr};
use std::mem::size_of;
use std::ptr::{null, null_mut};

pub const DEVICE_AUTO: i32 = -1;
pub const F32: i32 = 1;
pub const U8: i32 = 4;
pub const GATE_UP_CONCAT: i32 = 1;
pub const OUT_IN: i32 = 1;
pub const ROUTE_RENORMALIZE: u32 = 1;
pub const ERR_STALE_HANDLE: i32 = 3;

/// cumoe_view and cumoe_view_mut, which differ in const only. All zero: absent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct View {
    pub data: *mut c_void,
    pub rows: i64,
    pub cols: i64,
    pub ld: i64,
    pub owner: u64,
    pub device: i32,
    pub dtype: i32,
}

pub const ABSENT: View = View { data: null_mut(), rows: 0, cols: 0, ld: 0, owner: 0, device: 0, dtype: 0 };

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Routing {
    pub score: i32,
    pub top_k: i32,
    pub n_group: i32,
    pub topk_group: i32,
    pub group_score: i32,
    pub flags: u32,
    pub routed_scale: f32,
    pub softcap: f32,
    pub renorm_eps: f32,
    pub renorm_min: f32,
    pub zero_experts: i32,
    pub identity_experts: i32,
    pub reserved: [u64; 10],
}

/// Of quantised weights (cumoe/format.h); all zero: weights of the layer's type.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Format {
    pub element: i32,
    pub offset: i32,
    pub word: i32,
    pub packed: i32,
    pub order: u32,
    pub split: i32,
    pub block: [i32; 2],
    pub origin: [i32; 2],
    pub joined: i32,
    pub scale: i32,
    pub zero: i32,
    pub zero_add: i32,
    pub global: i32,
    pub rows: i32,
    pub row_element: i32,
    pub row_group: i32,
    pub row_scale: i32,
    pub reserved: [i32; 13],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct MoeDesc {
    pub size: u32,
    pub num_experts: i32,
    pub local_experts: i32,
    pub hidden: i32,
    pub inter: i32,
    pub shared_inter: i32,
    pub dtype: i32,
    pub out_dtype: i32,
    pub act: i32,
    pub act_alpha: f32,
    pub act_limit: f32,
    pub flags: u32,
    pub routing: Routing,
    pub up_format: Format,
    pub down_format: Format,
    pub shared_up_format: Format,
    pub shared_down_format: Format,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Projection {
    pub data: View,
    pub per_expert: *const *const c_void,
    pub expert_stride: i64,
    pub bias: View,
    pub reserved: [u64; 50],
}

pub const NO_PROJECTION: Projection =
    Projection { data: ABSENT, per_expert: null(), expert_stride: 0, bias: ABSENT, reserved: [0; 50] };

#[repr(C)]
pub struct WeightsDesc {
    pub size: u32,
    pub experts: i32,
    pub hidden: i32,
    pub inter: i32,
    pub gate_order: i32,
    pub up_major: i32,
    pub down_major: i32,
    pub reserved: i32,
    pub gate_up: Projection,
    pub gate: Projection,
    pub up: Projection,
    pub down: Projection,
    pub up_format: Format,
    pub down_format: Format,
    pub dtype: i32,
    pub reserved_end: i32,
}

#[repr(C)]
pub struct MoeArgs {
    pub size: u32,
    pub flags: u32,
    pub x: View,
    pub device_tokens: View,
    pub router_weight: View,
    pub router_bias: View,
    pub logits: View,
    pub ids: View,
    pub weights: View,
    pub select_bias: View,
    pub expert_map: View,
    pub shared: *mut c_void,
    pub shared_gate: View,
    pub residual: View,
    pub out_scale: f32,
    pub reserved: i32,
    pub out: View,
    pub ids_out: View,
    pub weights_out: View,
    pub counts_out: View,
    pub load: View,
    pub workspace: View,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Handle {
    pub id: u64,
}

// As in C: test/check/headers.sh holds the headers to the same numbers.
const _: () = {
    assert!(size_of::<View>() == 48);
    assert!(size_of::<Handle>() == 8);
    assert!(size_of::<Routing>() == 128);
    assert!(size_of::<Format>() == 128);
    assert!(size_of::<MoeDesc>() == 688);
    assert!(size_of::<Projection>() == 512);
    assert!(size_of::<WeightsDesc>() == 2344);
    assert!(size_of::<MoeArgs>() == 840);
};

type Pointer = *mut c_void;

extern "C" {
    fn cumoe_context_create(device: i32, config: *const c_void, context: *mut Pointer) -> i32;
    fn cumoe_context_destroy(context: Pointer) -> i32;
    fn cumoe_synchronize(context: Pointer, stream: Pointer) -> i32;
    fn cumoe_buffer_alloc_at(
        context: Pointer, dtype: i32, rows: i64, cols: i64, stream: Pointer, file: *const c_char, line: c_int,
        buffer: *mut Handle,
    ) -> i32;
    fn cumoe_buffer_free(buffer: *mut Handle) -> i32;
    fn cumoe_buffer_view_mut(buffer: Handle) -> View;
    fn cumoe_copy_from_host(context: Pointer, dst: View, src: *const c_void, bytes: usize, stream: Pointer) -> i32;
    fn cumoe_copy_to_host(context: Pointer, dst: *mut c_void, bytes: usize, src: View, stream: Pointer) -> i32;
    fn cumoe_plan_create(context: Pointer, desc: *const MoeDesc, plan: *mut Pointer) -> i32;
    fn cumoe_plan_destroy(plan: Pointer) -> i32;
    fn cumoe_plan_workspace(plan: Pointer, tokens: i64, bytes: *mut usize) -> i32;
    fn cumoe_weights_bind(context: Pointer, desc: *const WeightsDesc, weights: *mut Pointer) -> i32;
    fn cumoe_weights_destroy(weights: Pointer) -> i32;
    fn cumoe_moe_forward(plan: Pointer, weights: Pointer, args: *const MoeArgs, stream: Pointer) -> i32;
    fn cumoe_last_error() -> *const c_char;
    fn cumoe_architectures() -> *const c_char;
}

/// A status that is not CUMOE_OK, with the text that names call, argument, value and limit.
#[derive(Debug)]
pub struct Error {
    pub status: i32,
    pub text: String,
}

fn check(status: i32) -> Result<(), Error> {
    if status == 0 {
        return Ok(());
    }
    Err(Error { status, text: unsafe { CStr::from_ptr(cumoe_last_error()) }.to_string_lossy().into_owned() })
}

pub fn architectures() -> String {
    unsafe { CStr::from_ptr(cumoe_architectures()) }.to_string_lossy().into_owned()
}

pub struct Context(Pointer);

impl Context {
    pub fn open(device: i32) -> Result<Context, Error> {
        let mut context = null_mut();
        check(unsafe { cumoe_context_create(device, null(), &mut context) })?;
        Ok(Context(context))
    }
    pub fn buffer(&self, dtype: i32, rows: usize, cols: usize) -> Result<Buffer<'_>, Error> {
        let mut handle = Handle { id: 0 };
        let (file, line) = (c"rust".as_ptr(), line!() as c_int);
        check(unsafe {
            cumoe_buffer_alloc_at(self.0, dtype, rows as i64, cols as i64, null_mut(), file, line, &mut handle)
        })?;
        Ok(Buffer { context: self, handle })
    }
    pub fn matrix(&self, values: &[f32], cols: usize) -> Result<Buffer<'_>, Error> {
        let buffer = self.buffer(F32, values.len() / cols, cols)?;
        let bytes = std::mem::size_of_val(values);
        check(unsafe { cumoe_copy_from_host(self.0, buffer.view(), values.as_ptr().cast(), bytes, null_mut()) })?;
        Ok(buffer)
    }
    pub fn plan(&self, desc: &MoeDesc) -> Result<Plan<'_>, Error> {
        let mut plan = null_mut();
        check(unsafe { cumoe_plan_create(self.0, desc, &mut plan) })?;
        Ok(Plan { _context: self, plan })
    }
    pub fn bind(&self, desc: &WeightsDesc) -> Result<Weights<'_>, Error> {
        let mut weights = null_mut();
        check(unsafe { cumoe_weights_bind(self.0, desc, &mut weights) })?;
        Ok(Weights { _context: self, weights })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        unsafe { cumoe_context_destroy(self.0) };
    }
}

pub struct Buffer<'c> {
    context: &'c Context,
    pub handle: Handle,
}

impl Buffer<'_> {
    pub fn view(&self) -> View {
        unsafe { cumoe_buffer_view_mut(self.handle) }
    }
    /// Reads a view of f32, of this buffer or of what it was.
    pub fn read(context: &Context, view: View) -> Result<Vec<f32>, Error> {
        let mut values = vec![0f32; (view.rows * view.cols) as usize];
        let bytes = values.len() * 4;
        check(unsafe { cumoe_copy_to_host(context.0, values.as_mut_ptr().cast(), bytes, view, null_mut()) })?;
        check(unsafe { cumoe_synchronize(context.0, null_mut()) })?;
        Ok(values)
    }
    pub fn values(&self) -> Result<Vec<f32>, Error> {
        Buffer::read(self.context, self.view())
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        unsafe { cumoe_buffer_free(&mut self.handle) };
    }
}

pub struct Plan<'c> {
    _context: &'c Context,
    plan: Pointer,
}

impl Plan<'_> {
    pub fn workspace(&self, tokens: usize) -> Result<usize, Error> {
        let mut bytes = 0;
        check(unsafe { cumoe_plan_workspace(self.plan, tokens as i64, &mut bytes) })?;
        Ok(bytes)
    }
    pub fn forward(&self, weights: &Weights, args: &MoeArgs) -> Result<(), Error> {
        check(unsafe { cumoe_moe_forward(self.plan, weights.weights, args, null_mut()) })
    }
}

impl Drop for Plan<'_> {
    fn drop(&mut self) {
        unsafe { cumoe_plan_destroy(self.plan) };
    }
}

pub struct Weights<'c> {
    _context: &'c Context,
    weights: Pointer,
}

impl Drop for Weights<'_> {
    fn drop(&mut self) {
        unsafe { cumoe_weights_destroy(self.weights) };
    }
}
