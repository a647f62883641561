// Owners around cumoe-sys that clean up after themselves, for what this program uses.
use cumoe_sys::*;
use std::ffi::{c_int, CStr};
use std::ptr::{null, null_mut};

/// A size that a struct of cumoe begins with.
pub fn size_of_struct<T>() -> u32 {
    std::mem::size_of::<T>() as u32
}

/// For operands that are only read.
pub fn read_only(view: cumoe_view_mut) -> cumoe_view {
    let cumoe_view_mut { data, rows, cols, ld, owner, device, dtype } = view;
    cumoe_view { data, rows, cols, ld, owner, device, dtype }
}

/// A status that is not CUMOE_OK, with the text that names call, argument, value and limit.
#[derive(Debug)]
pub struct Error {
    pub status: cumoe_status,
    pub text: String,
}

fn check(status: cumoe_status) -> Result<(), Error> {
    if status == CUMOE_OK {
        return Ok(());
    }
    Err(Error { status, text: unsafe { CStr::from_ptr(cumoe_last_error()) }.to_string_lossy().into_owned() })
}

pub fn architectures() -> String {
    unsafe { CStr::from_ptr(cumoe_architectures()) }.to_string_lossy().into_owned()
}

pub struct Context(cumoe_context);

impl Context {
    pub fn open(device: i32) -> Result<Context, Error> {
        let mut context = null_mut();
        check(unsafe { cumoe_context_create(device, null(), &mut context) })?;
        Ok(Context(context))
    }
    pub fn buffer(&self, dtype: cumoe_dtype, rows: usize, cols: usize) -> Result<Buffer<'_>, Error> {
        let mut handle = cumoe_buffer::default();
        let (file, line) = (c"rust".as_ptr(), line!() as c_int);
        check(unsafe {
            cumoe_buffer_alloc_at(self.0, dtype, rows as i64, cols as i64, null_mut(), file, line, &mut handle)
        })?;
        Ok(Buffer { context: self, handle })
    }
    pub fn matrix(&self, values: &[f32], cols: usize) -> Result<Buffer<'_>, Error> {
        let buffer = self.buffer(CUMOE_F32, values.len() / cols, cols)?;
        let bytes = std::mem::size_of_val(values);
        check(unsafe { cumoe_copy_from_host(self.0, buffer.view(), values.as_ptr().cast(), bytes, null_mut()) })?;
        Ok(buffer)
    }
    pub fn plan(&self, desc: &cumoe_moe_desc) -> Result<Plan<'_>, Error> {
        let mut plan = null_mut();
        check(unsafe { cumoe_plan_create(self.0, desc, &mut plan) })?;
        Ok(Plan { _context: self, plan })
    }
    pub fn bind(&self, desc: &cumoe_weights_desc) -> Result<Weights<'_>, Error> {
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
    pub handle: cumoe_buffer,
}

impl Buffer<'_> {
    pub fn view(&self) -> cumoe_view_mut {
        unsafe { cumoe_buffer_view_mut(self.handle) }
    }
    /// Reads a view of f32, of this buffer or of what it was.
    pub fn read(context: &Context, view: cumoe_view_mut) -> Result<Vec<f32>, Error> {
        let mut values = vec![0f32; (view.rows * view.cols) as usize];
        let bytes = values.len() * 4;
        let (to, from) = (values.as_mut_ptr().cast(), read_only(view));
        check(unsafe { cumoe_copy_to_host(context.0, to, bytes, from, null_mut()) })?;
        check(unsafe { cumoe_synchronize(context.0, null_mut()) })?;
        Ok(values)
    }
    pub fn input(&self) -> cumoe_view {
        read_only(self.view())
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
    plan: cumoe_plan,
}

impl Plan<'_> {
    pub fn workspace(&self, tokens: usize) -> Result<usize, Error> {
        let mut bytes = 0;
        check(unsafe { cumoe_plan_workspace(self.plan, tokens as i64, &mut bytes) })?;
        Ok(bytes)
    }
    pub fn forward(&self, weights: &Weights, args: &cumoe_moe_args) -> Result<(), Error> {
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
    weights: cumoe_weights,
}

impl Drop for Weights<'_> {
    fn drop(&mut self) {
        unsafe { cumoe_weights_destroy(self.weights) };
    }
}
