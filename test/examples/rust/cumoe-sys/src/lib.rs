//! cumoe's C interface, as build.rs reads it out of the installed headers, which are the manual: names are C's, every
//! struct has a `Default` of zeros. What is inline in C (cumoe_matrix, presets of routings and formats) is not here.
#![no_std]
#![allow(non_camel_case_types)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
