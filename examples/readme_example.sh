#!/usr/bin/env bash
# Compiles and runs the C and the C++ program of the README exactly as they are printed there, on the
# simulated driver, so that what a stranger copies from it works.
#
# SPDX-License-Identifier: MIT OR Apache-2.0
set -euo pipefail

cd "$(dirname "$0")/.."
out=target/demo
mkdir -p "$out"
export LD_LIBRARY_PATH="$PWD/target/release:$PWD/target/sim"

# The first block of that language, from README.md to a file.
program() {
    awk -v open="\`\`\`$1" '$0 == open { on = !done; next } $0 == "```" { if (on) done = 1; on = 0 } on' \
        README.md > "$out/readme.$1"
    grep -q 'int main' "$out/readme.$1" || { echo "README.md has no program in $1" >&2; exit 1; }
}

warnings=(-Wall -Wextra -Wpedantic -Werror)

program c
"${CC:-cc}" -std=c99 "${warnings[@]}" -Iinclude "$out/readme.c" -o "$out/readme-c" \
    -Ltarget/release -lcudapool
"$out/readme-c"

program cpp
"${CXX:-c++}" -std=c++11 "${warnings[@]}" -Iinclude "$out/readme.cpp" -o "$out/readme-cpp" -ldl
"$out/readme-cpp"

# Its lines of Python are Python, and the modules in them have what they use.
PYTHONPATH=examples/python python3 - <<'END'
import ast, re

for block in re.findall(r"```python\n(.*?)```", open("README.md", encoding="utf-8").read(), re.S):
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id.startswith("cudapool"):
            module = ast.parse(open(f"examples/python/{node.value.id}.py", encoding="utf-8").read())
            names = [each.name for each in module.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))]
            assert node.attr in names, f"{node.value.id} has no {node.attr}"
END

# Its table of status codes is the header's.
codes=$(sed -n 's/^  \(POOL_[A-Z_]*\) = \([0-9]*\),$/| `\1` | \2 |/p' include/cudapool.h)
[ -n "$codes" ]
while IFS= read -r row; do
    grep -qF "$row" README.md || { echo "README.md lacks the row $row" >&2; exit 1; }
done <<<"$codes"

# Its defaults are the library's.
cat > "$out/defaults.c" <<'END'
#include <stdio.h>
#include "cudapool.h"
int main(void) {
  pool_options options = {0};
  options.struct_size = sizeof options;
  if (pool_options_init(&options) != POOL_OK) return 1;
  printf("max_idle %u%%\nsettle_ms %u\n", (unsigned)options.max_idle_percent, (unsigned)options.settle_ms);
  return 0;
}
END
"${CC:-cc}" -std=c99 "${warnings[@]}" -Iinclude "$out/defaults.c" -o "$out/defaults" \
    -Ltarget/release -lcudapool
env -u CUDAPOOL_CONF "$out/defaults" | while read -r key value; do
    grep -q "^| \`$key\` |.*| \`$value\` |" README.md ||
        { echo "README.md: the default of $key is $value" >&2; exit 1; }
done

echo "README.md: its programs compile and run; status codes and defaults are the library's"
