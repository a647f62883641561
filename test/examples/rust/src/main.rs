// cumoe from Rust: opens a context and a buffer, writes, reads back, closes.
use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr::{null, null_mut};

#[repr(C)]
#[derive(Clone, Copy)]
struct View {
    data: *mut c_void,
    rows: i64,
    cols: i64,
    ld: i64,
    owner: u64,
    device: i32,
    dtype: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Buffer {
    id: u64,
}

type Context = *mut c_void;
type Stream = *mut c_void;
const DEVICE_AUTO: i32 = -1;
const F32: i32 = 1;

extern "C" {
    fn cumoe_context_create(device: i32, config: *const c_void, context: *mut Context) -> i32;
    fn cumoe_context_destroy(context: Context) -> i32;
    fn cumoe_synchronize(context: Context, stream: Stream) -> i32;
    fn cumoe_buffer_alloc_at(
        context: Context, dtype: i32, rows: i64, cols: i64, stream: Stream, file: *const c_char, line: c_int,
        buffer: *mut Buffer,
    ) -> i32;
    fn cumoe_buffer_free(buffer: *mut Buffer) -> i32;
    fn cumoe_buffer_view_mut(buffer: Buffer) -> View;
    fn cumoe_copy_from_host(context: Context, dst: View, src: *const c_void, bytes: usize, stream: Stream) -> i32;
    fn cumoe_copy_to_host(context: Context, dst: *mut c_void, bytes: usize, src: View, stream: Stream) -> i32;
    fn cumoe_last_error() -> *const c_char;
    fn cumoe_architectures() -> *const c_char;
}

fn check(status: i32) {
    if status != 0 {
        panic!("{}", unsafe { CStr::from_ptr(cumoe_last_error()) }.to_string_lossy());
    }
}

fn main() {
    let sent = [1.5f32, -2.0, 3.25, 4.0, 5.0, -6.5];
    let mut received = [0f32; 6];
    let bytes = std::mem::size_of_val(&sent);
    let mut context: Context = null_mut();
    let mut buffer = Buffer { id: 0 };
    unsafe {
        check(cumoe_context_create(DEVICE_AUTO, null(), &mut context));
        check(cumoe_buffer_alloc_at(context, F32, 2, 3, null_mut(), c"main.rs".as_ptr(), line!() as c_int, &mut buffer));
        let view = cumoe_buffer_view_mut(buffer);
        check(cumoe_copy_from_host(context, view, sent.as_ptr().cast(), bytes, null_mut()));
        check(cumoe_copy_to_host(context, received.as_mut_ptr().cast(), bytes, view, null_mut()));
        check(cumoe_synchronize(context, null_mut()));
        let mut stale = buffer;
        check(cumoe_buffer_free(&mut buffer));
        assert_ne!(cumoe_buffer_free(&mut stale), 0, "a stale handle is refused");
        check(cumoe_context_destroy(context));
        println!("machine code for {}", CStr::from_ptr(cumoe_architectures()).to_string_lossy());
    }
    assert_eq!(sent, received);
}
