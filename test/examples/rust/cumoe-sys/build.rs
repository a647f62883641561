// Asks pkg-config where cumoe is, writes what its headers declare in Rust (bindings.py) and tells cargo how to link it.
use std::process::Command;

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn main() {
    let include = output(Command::new("pkg-config").args(["--variable=includedir", "cumoe"]));
    let bindings = std::env::var("OUT_DIR").unwrap() + "/bindings.rs";
    output(Command::new("python3").args(["bindings.py", include.trim(), &bindings]));
    println!("cargo:rerun-if-changed=bindings.py");
    println!("cargo:rerun-if-changed={}", include.trim());

    for word in output(Command::new("pkg-config").args(["--libs", "cumoe"])).split_whitespace() {
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
