# Sourced by the scripts of this folder: one line a case, and the closing line.
passed=0 failed=0 skipped=0
pass() { passed=$((passed + 1)); echo "ok    $1"; }
fail() { failed=$((failed + 1)); echo "FAIL  $1"; [ -z "$2" ] || printf '%s\n' "$2" | sed 's/^/      /'; }
skip() { skipped=$((skipped + 1)); echo "skip  $1: $2"; }
# empty NAME TEXT: passes when the text, a list of complaints, is empty.
empty() { if [ -z "$2" ]; then pass "$1"; else fail "$1" "$2"; fi; }
# quiet NAME COMMAND...: passes when the command succeeds; its output is shown otherwise.
quiet() {
  quiet_name=$1
  shift
  if quiet_text=$("$@" 2>&1); then pass "$quiet_name"; else fail "$quiet_name" "$quiet_text"; fi
}
have() { command -v "$1" > /dev/null 2>&1; }
# The functions that the headers declare.
declared() {
  { echo '#define CUMOE_EXPERIMENTAL'; (cd include && printf '#include <%s>\n' cumoe/*.h); } |
    ${CC:-cc} -Iinclude -E -P - | tr '\n' ' ' | tr ';' '\n' |
    sed -n 's/.*visibility("default")[^)]*))//p' | grep -o 'cumoe_[a-z0-9_]* *(' | tr -d ' (' | sort -u
}
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ "$failed" -eq 0 ]; exit; }

# What the archive's other members define, which a program without them does not have: ARCHIVE SCRATCH_FILE.
beside_the_layer() {
  for member in $(ar t "$1" | grep -vx cumoe.o); do
    ar p "$1" "$member" > "$2" && nm -g --defined-only "$2" | awk '{ print $3 }'
  done
}
