// Asks pkg-config how to link cumoe and tells cargo.
use std::process::Command;

fn main() {
    let output = Command::new("pkg-config").args(["--libs", "cumoe"]).output().expect("pkg-config");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for word in String::from_utf8(output.stdout).unwrap().split_whitespace() {
        if let Some(folder) = word.strip_prefix("-L") {
            println!("cargo:rustc-link-search=native={folder}");
        } else if let Some(name) = word.strip_prefix("-l") {
            // -l:libcumoe.a names the archive's file, as the shared library may lie beside it.
            let archive = name.strip_prefix(":lib").and_then(|file| file.strip_suffix(".a"));
            match archive.or((name == "cudart_static").then_some(name)) {
                Some(name) => println!("cargo:rustc-link-lib=static={name}"),
                None => println!("cargo:rustc-link-lib=dylib={name}"),
            }
        }
    }
}
