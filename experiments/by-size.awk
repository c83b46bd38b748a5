# Draws what costs how much by size, both by powers: of lines NAME-MIB MICROSECONDS those whose names stand in `names`.
function x(mib) { return 70 + 75 * log(mib / smallest) / log(2) * 6 / steps }
function y(us) { return 368 - 58 * log(us < 1 ? 1 : us) / log(10) }
match($1, /-[0-9]+$/) {
  mib = substr($1, RSTART + 1) + 0
  value[substr($1, 1, RSTART - 1), mib] = $2
  if (mib && !(mib in known)) { known[mib] = 1; size[++n] = mib }
}
END {
  count = split(names, name, " ")
  split("#0b6e99 #2e8b57 #c0392b #8e44ad", colour, " ")
  smallest = size[1]
  steps = log(size[n] / smallest) / log(2)
  printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 420\" font-family=\"sans-serif\" font-size=\"12\">"
  printf "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
  for (i = 1; i <= n; i++)
    printf "<path d=\"M%.1f 16V368\" stroke=\"#ddd\"/><text x=\"%.1f\" y=\"384\" text-anchor=\"middle\">%d</text>\n", x(size[i]), x(size[i]), size[i]
  for (i = 0; i <= 6; i++)
    printf "<path d=\"M70 %.1fH520\" stroke=\"#ddd\"/><text x=\"64\" y=\"%.1f\" text-anchor=\"end\">%d</text>\n", y(10 ^ i), y(10 ^ i) + 4, 10 ^ i
  for (k = 1; k <= count; k++) {
    path = ""
    for (i = 1; i <= n; i++) {
      path = path (i > 1 ? "L" : "M") sprintf("%.1f %.1f", x(size[i]), y(value[name[k], size[i]]))
      printf "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\" fill=\"%s\"/>", x(size[i]), y(value[name[k], size[i]]), colour[k]
    }
    printf "<path d=\"%s\" fill=\"none\" stroke=\"%s\"/><text x=\"535\" y=\"%d\" fill=\"%s\">%s</text>\n", path, colour[k], 20 + 20 * k, colour[k], name[k]
  }
  printf "<text x=\"300\" y=\"408\" text-anchor=\"middle\">MiB touched; microseconds of 1,000 instructions</text></svg>\n"
}
