# report.sh: what `run` writes at its end, as JSON and as Markdown. Sourced by it; takes `rows`, `figures`,
# `bad` and the logs from there.

json_string() {
    # Byte by byte: a program may print what is no text in any encoding.
    local text=$1 LC_ALL=C
    text=${text//\\/\\\\}
    text=${text//\"/\\\"}
    text=${text//$TAB/ }
    text=${text//$'\r'/}
    text=${text//$'\n'/\\n}
    text=${text//[[:cntrl:]]/}
    printf '"%s"' "${text//[^ -~]/?}"
}

write_json() {
    local row number name result seconds detail value comma
    printf '{\n  "short": %s,\n  "seconds": %d,\n  "bad": %d,\n  "latency": ' \
        "$( ((short)) && printf true || printf false)" "$SECONDS" "$bad"
    json_string "${latency_line:-}"
    printf ',\n  "checks": ['
    comma=
    for row in ${rows[@]+"${rows[@]}"}; do
        IFS=$TAB read -r number name result seconds detail <<<"$row"
        printf '%s\n    {"step": %d, "name": %s, "result": %s, "seconds": %d, "detail": %s}' \
            "$comma" "$number" "$(json_string "$name")" "$(json_string "$result")" "$seconds" \
            "$(json_string "$detail")"
        comma=,
    done
    printf '\n  ],\n  "figures": ['
    comma=
    for row in ${figures[@]+"${figures[@]}"}; do
        IFS=$TAB read -r number name value <<<"$row"
        printf '%s\n    {"step": %d, "name": %s, "value": %s}' "$comma" "$number" "$(json_string "$name")" \
            "$(json_string "$value")"
        comma=,
    done
    printf '\n  ]\n}\n'
}

# Figures of a step by name, those named "SUBJECT, WAY: FIGURE" with the ways side by side.
write_figures() {
    local step=$1 row number name value subject way line
    local -a ways=() lines=()
    local -A cell=() known=()
    for row in ${figures[@]+"${figures[@]}"}; do
        IFS=$TAB read -r number name value <<<"$row"
        [[ $number == "$step" ]] || continue
        way=value line=$name
        if [[ $name == *', '*': '* ]]; then
            subject=${name%%, *}
            way=${name#*, }
            way=${way%: *}
            line="$subject: ${name##*: }"
        fi
        [[ -n ${known[way $way]:-} ]] || { known[way $way]=1 && ways+=("$way"); }
        [[ -n ${known[line $line]:-} ]] || { known[line $line]=1 && lines+=("$line"); }
        cell[$line$TAB$way]=${value//|/\\|}
    done
    ((${#lines[@]})) || return
    printf '\n| step %s |' "$step"
    printf ' %s |' "${ways[@]}"
    printf '\n| --- |'
    for way in "${ways[@]}"; do printf ' --- |'; done
    printf '\n'
    for line in "${lines[@]}"; do
        printf '| %s |' "${line//|/\\|}"
        for way in "${ways[@]}"; do printf ' %s |' "${cell[$line$TAB$way]:-}"; done
        printf '\n'
    done
}

write_table() {
    local row number name result seconds detail
    for number in 1 2 3 4 5 6 7; do
        write_figures "$number"
    done
    if [[ -n ${latency_line:-} ]]; then
        printf '\n`CUDASIM_LATENCY=%s`\n' "$latency_line"
    fi
    if [[ -n ${pairs_log:-} ]]; then
        printf '\n```\n%s\n```\n' "$(<"$pairs_log")"
    fi
    printf '\n| step | check | result | s | |\n| --- | --- | --- | --- | --- |\n'
    for row in ${rows[@]+"${rows[@]}"}; do
        IFS=$TAB read -r number name result seconds detail <<<"$row"
        printf '| %s | %s | %s | %s | %s |\n' \
            "$number" "${name//|/\\|}" "$result" "$seconds" "${detail//|/\\|}"
    done
    printf '\n%d checks, %d of them failed or differ, %d skipped; %d s\n' "${#rows[@]}" "$bad" \
        "$(printf '%s\n' ${rows[@]+"${rows[@]}"} | cut -f 3 | grep -c '^skipped$')" "$SECONDS"
}
