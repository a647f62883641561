"""What cumoe's headers declare, in Rust: python3 bindings.py INCLUDE BINDINGS

Declarations are read as the preprocessor leaves them: enums, structs, opaque handles, types of functions, functions.
The C compiler (CC) says what constants are worth and how structs lie; the crate asserts that rustc lays them out the
same. Inline functions (cumoe_matrix, the presets of routings and formats) and typed.h are for C alone.
"""
import os
import re
import subprocess
import sys
import tempfile

CC = os.environ.get("CC", "cc")
KEYWORDS = "as async await box dyn fn impl in let loop match mod move mut pub ref self trait type use where".split()
TYPES = {"int": "c_int", "char": "c_char", "void": "c_void", "size_t": "usize", "float": "f32", "double": "f64"}
TYPES.update({f"int{bits}_t": f"i{bits}" for bits in (8, 16, 32, 64)})
TYPES.update({f"uint{bits}_t": f"u{bits}" for bits in (8, 16, 32, 64)})


def preprocessed(include):
    """The text of the public headers alone, without attributes and the bodies of functions."""
    headers = sorted(h for h in os.listdir(f"{include}/cumoe") if h != "typed.h")
    source = "#define CUMOE_EXPERIMENTAL\n" + "".join(f"#include <cumoe/{h}>\n" for h in headers)
    command = [CC, "-x", "c", "-std=c11", f"-I{include}", "-E", "-"]
    text, ours = [], False
    for line in subprocess.run(command, input=source, text=True, check=True, stdout=subprocess.PIPE).stdout.split("\n"):
        if line.startswith("# "):
            ours = "/cumoe/" in line
        elif ours:
            text.append(line)
    text = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", " ", "\n".join(text))
    text = re.sub(r"\s+", " ", text)
    body = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
    return re.sub(r"static inline [^{;]*" + body, "", text), source


def macros(include, source):
    """Macros that are numbers: name -> text."""
    command = [CC, "-x", "c", "-std=c11", f"-I{include}", "-E", "-dM", "-"]
    lines = subprocess.run(command, input=source, text=True, check=True, stdout=subprocess.PIPE).stdout
    return dict(re.findall(r"^#define (CUMOE_\w+) +(\(?-?\d+\)?|\(CUMOE_VERSION.*)$", lines, re.M))


def compiled(include, source, lines):
    """What a C program with these statements prints, a number a line."""
    with tempfile.TemporaryDirectory() as work:
        with open(f"{work}/facts.c", "w") as file:
            file.write(f"{source}#include <stddef.h>\n#include <stdio.h>\nint main(void)\n{{\n")
            file.writelines(f'  printf("%lld\\n", (long long)({line}));\n' for line in lines)
            file.write("  return 0;\n}\n")
        subprocess.run([CC, "-std=c11", f"-I{include}", "-o", f"{work}/facts", f"{work}/facts.c"], check=True)
        return subprocess.run([f"{work}/facts"], text=True, check=True, stdout=subprocess.PIPE).stdout.split()


def rust_type(text):
    """A type without its name: `const void *const *` is *const *const c_void."""
    words = re.findall(r"\w+|\*", text)
    words = [w for w in words if w not in ("struct", "enum")]
    constant = words[0] == "const"
    base = words[constant]
    kind = TYPES.get(base, base)
    for word in words[constant + 1:]:
        if word == "*":
            kind, constant = ("*const " if constant else "*mut ") + kind, False
        else:
            constant = True
    return kind


def escaped(name):
    return f"r#{name}" if name in KEYWORDS else name


def parameters(text):
    if text.strip() == "void":
        return ""
    parts = [re.match(r"(.*?[ *])(\w+)$", part.strip()) for part in text.split(",")]
    return ", ".join(f"{escaped(name)}: {rust_type(kind)}" for kind, name in (p.groups() for p in parts))


def returned(text):
    return "" if text.strip() == "void" else f" -> {rust_type(text)}"


def pointer_to_function(kind, arguments):
    return f'Option<unsafe extern "C" fn({parameters(arguments)}){returned(kind)}>'


class Crate:
    def __init__(self):
        self.text, self.functions, self.constants, self.structs = [], [], [], []

    def members(self, text, owner):
        """(name, Rust type) of each member; an inner union becomes a type of its own."""
        for body, name in re.findall(r"union \{([^{}]*)\} (\w+);", text):
            self.aggregate("union", f"{owner}_{name}", body)
        text = re.sub(r"union \{[^{}]*\} (\w+);", rf"{owner}_\1 \1;", text)
        for member in filter(None, (m.strip() for m in text.split(";"))):
            function = re.match(r"(.*)\(\*(\w+)\)\((.*)\)$", member)
            if function:
                yield function[2], pointer_to_function(function[1], function[3])
                continue
            kind, names = re.match(r"((?:const )?\w+ )(.*)$", member.replace("struct ", "")).groups()
            for name in names.split(","):
                stars, name, size = re.match(r"\s*((?:\*|const\b|\s)*)(\w+)(?:\[(\w+)\])?$", name).groups()
                plain = rust_type(kind + stars)
                size = f"{size} as usize" if size and not size.isdigit() else size
                yield name, f"[{plain}; {size}]" if size else plain

    def aggregate(self, keyword, name, body):
        members = list(self.members(body, name))
        lines = "".join(f"    pub {escaped(m)}: {kind},\n" for m, kind in members)
        self.text.append(f"#[repr(C)]\n#[derive(Clone, Copy)]\npub {keyword} {name} {{\n{lines}}}\n")
        if keyword == "struct":
            self.structs.append((name, [m for m, _ in members]))

    def enum(self, name, body):
        kind = name or "u32"
        if name:
            self.text.append(f"pub type {name} = i32;\n")
        self.constants += [(c, kind) for c in re.findall(r"(CUMOE_\w+)\s*=", body)]

    def declaration(self, text):
        """One declaration, without its semicolon."""
        opaque = re.match(r"typedef struct (\w+) \*(\w+)$", text)
        function_type = re.match(r"typedef (.*)\(\*(\w+)\)\((.*)\)$", text)
        enum = re.match(r"(?:typedef )?enum ?\w* \{(.*)\} ?(\w*)$", text)
        struct = re.match(r"typedef struct \w+ \{(.*)\} (\w+)$", text)
        function = re.match(r"([\w ]+[ *])(cumoe_\w+)\((.*)\)$", text)
        if opaque:
            self.text.append(f"#[repr(C)]\npub struct {opaque[1]} {{\n    private: [u8; 0],\n}}\n"
                             f"pub type {opaque[2]} = *mut {opaque[1]};\n")
        elif function_type:
            kind = pointer_to_function(function_type[1], function_type[3])
            self.text.append(f"pub type {function_type[2]} = {kind};\n")
        elif enum:
            self.enum(enum[2], enum[1])
        elif struct:
            self.aggregate("struct", struct[2], struct[1])
        elif function:
            self.functions.append(f"    pub fn {function[2]}({parameters(function[3])}){returned(function[1])};\n")
        elif not re.match(r"struct \w+$", text):
            sys.exit(f"bindings.py cannot read: {text}")


def declarations(text):
    start = depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if letter == ";" and depth == 0:
            yield text[start:at].strip()
            start = at + 1


def main():
    include, output = sys.argv[1:]
    text, source = preprocessed(include)
    crate = Crate()
    for declaration in declarations(text):
        crate.declaration(declaration)
    crate.constants += [(name, "i32") for name in sorted(macros(include, source))]
    structs = crate.structs
    layout = [(f"sizeof({s})", f"size_of::<{s}>()") for s, _ in structs]
    layout += [(f"offsetof({s}, {m})", f"offset_of!({s}, {escaped(m)})") for s, members in structs for m in members]
    values = compiled(include, source, [name for name, _ in crate.constants] + [c for c, _ in layout])

    out = ["use core::ffi::{c_char, c_int, c_void};\nuse core::mem::{offset_of, size_of, zeroed};\n\n", *crate.text]
    out += [f"pub const {name}: {kind} = {value};\n" for (name, kind), value in zip(crate.constants, values)]
    out += ["pub const CUMOE_STREAM_PER_THREAD: cumoe_stream = 2 as cumoe_stream;\n"]
    out += [f"impl Default for {s} {{\n    fn default() -> Self {{\n        unsafe {{ zeroed() }}\n    }}\n}}\n"
            for s, _ in structs]
    out += ['extern "C" {\n', *crate.functions, "}\n", "// As the C compiler lays them out.\nconst _: () = {\n"]
    out += [f"    assert!({rust} == {value});\n" for (_, rust), value in zip(layout, values[len(crate.constants):])]
    with open(output, "w") as file:
        file.write("".join(out) + "};\n")


main()
