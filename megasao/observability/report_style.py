"""The report's style sheet: light and dark, no external fonts or images."""

CSS = """
:root {
  color-scheme: light dark; --bg: #fbfbfa; --card: #ffffff; --ink: #1c1e21; --soft: #62676e; --faint: #9298a0;
  --rule: #e4e5e3; --grid: #eeefed; --tint: #f3f4f2; --s1: #2463a6; --s2: #c2571b; --s3: #2c7a55;
  --s4: #7c4d9e; --s5: #9a7b12; --s6: #b23a5e; --s7: #5b6b7a; --pos: #1f8a5b; --neg: #c8433a; --act: #2463a6;
  --val: #7c4d9e; --good: #1a7a4f; --bad: #b5392f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #131517; --card: #1b1e21; --ink: #e6e7e8; --soft: #a2a8af; --faint: #757c85; --rule: #2d3135;
    --grid: #262a2e; --tint: #22262a; --s1: #6ba6e3; --s2: #e8935a; --s3: #66bd91; --s4: #b68dd6;
    --s5: #d1b24c; --s6: #e07a97; --s7: #93a4b4; --pos: #3fae7c; --neg: #e0685f; --act: #6ba6e3;
    --val: #b68dd6; --good: #66bd91; --bad: #ea7e75;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased;
}
main { max-width: 1280px; margin: 0 auto; padding: 40px 32px 72px; }
h1 { font-size: 28px; line-height: 1.2; font-weight: 650; letter-spacing: -.01em; margin: 2px 0 6px; }
h2 { font-size: 19px; font-weight: 650; margin: 52px 0 2px; letter-spacing: -.005em; }
h3 { font-size: 14px; font-weight: 650; margin: 0; }
p { margin: 0; }
.note { color: var(--soft); margin-bottom: 16px; }
.over { color: var(--soft); font-size: 13px; }
.meta { color: var(--soft); display: flex; flex-wrap: wrap; gap: 2px 18px; }
.status { font-weight: 600; color: var(--good); }
.status.partial { color: var(--bad); }
.tiles { display: grid; grid-template-columns: 1.45fr 1.45fr 1fr 1fr 1fr 1fr; gap: 14px; margin: 26px 0 0; }
@media (max-width:1100px) {
  .tiles { grid-template-columns: repeat(auto-fit, minmax(205px, 1fr)); }
}
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 13px 16px 12px; }
.tile span { display: block; color: var(--soft); font-size: 13px; }
.tile b { display: block; font-size: 23px; font-weight: 650; letter-spacing: -.01em; line-height: 1.3; }
.tile b { white-space: nowrap; }
.tile b i { font-size: 17px; font-style: normal; font-weight: 400; color: var(--faint); }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 310px), 1fr)); gap: 16px; }
.pair { display: flex; flex-wrap: wrap; gap: 16px; align-items: flex-start; }
.pair > * { flex: 1 1 max-content; min-width: min(100%, 300px); max-width: 100%; }
.chart {
  margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 14px 14px 6px; position: relative; min-width: 0; display: flex; flex-direction: column;
}
.chart figcaption p { color: var(--soft); font-size: 12.5px; line-height: 1.4; }
.chart .plot { margin-top: auto; }
.chart.empty { padding-bottom: 14px; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 12.5px; color: var(--soft); margin: 4px 0 4px; }
.legend b { color: var(--ink); font-weight: 600; }
.key {
  display: inline-block; width: 11px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; background: currentColor;
}
svg { display: block; width: 100%; height: auto; overflow: visible; touch-action: pan-y; }
.gridline { stroke: var(--grid); }
.axis { stroke: var(--rule); }
.tick { fill: var(--soft); font-size: 11.5px; }
.line { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
.line.raw { stroke-width: .8; opacity: .32; }
.dot { fill: currentColor; stroke: var(--card); stroke-width: 1.2; }
.area { fill: currentColor; opacity: .82; }
.cursor line { stroke: var(--faint); }
.cursor circle { fill: currentColor; stroke: var(--card); stroke-width: 1.5; }
.s1 { color: var(--s1); }
.s2 { color: var(--s2); }
.s3 { color: var(--s3); }
.s4 { color: var(--s4); }
.s5 { color: var(--s5); }
.s6 { color: var(--s6); }
.s7 { color: var(--s7); }
#tip {
  position: absolute; z-index: 9; pointer-events: none; background: var(--card); color: var(--ink);
  border: 1px solid var(--rule); border-radius: 8px; box-shadow: 0 6px 22px rgb(0 0 0 / .16);
  padding: 8px 11px; font-size: 12.5px; line-height: 1.5; max-width: 340px; display: none;
}
#tip .head { font-weight: 600; margin-bottom: 2px; white-space: pre-wrap; }
#tip .row { display: flex; justify-content: space-between; gap: 18px; }
#tip .row span:first-child { color: var(--soft); }
#tip .row span:last-child { font-weight: 550; text-align: right; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; background: var(--card); }
.box { border: 1px solid var(--rule); border-radius: 10px; overflow: hidden; background: var(--card); }
.box h3 { padding: 13px 16px 9px; }
th, td { padding: 7px 16px; text-align: right; white-space: nowrap; border-top: 1px solid var(--grid); }
th { font-weight: 500; color: var(--soft); font-size: 12.5px; border-top: 0; }
th:first-child, td:first-child { text-align: left; }
tr.strong td { font-weight: 650; background: var(--tint); }
td.none, .none { color: var(--soft); }
.none { background: var(--card); border: 1px dashed var(--rule); border-radius: 10px; padding: 14px 16px; }
ul.missing { margin: 14px 0 0; padding-left: 20px; color: var(--bad); }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--soft); }
pre {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 18px;
  overflow: auto;
  font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
}
.switch {
  display: flex; flex-wrap: wrap; gap: 8px 22px; align-items: center; position: sticky; top: 0; z-index: 3;
  background: var(--bg); padding: 10px 0; margin-bottom: 6px;
}
.buttons {
  display: inline-flex; border: 1px solid var(--rule); border-radius: 8px; overflow: hidden;
  background: var(--card);
}
.buttons label { padding: 5px 13px; cursor: pointer; font-size: 13.5px; border-left: 1px solid var(--rule); }
.buttons label:first-child { border-left: 0; }
.buttons input { position: absolute; opacity: 0; }
.buttons label:has(:checked) { background: var(--ink); color: var(--bg); }
.buttons label:has(:focus-visible) { outline: 2px solid var(--s1); }
.keys { display: flex; gap: 18px; font-size: 12.5px; color: var(--soft); align-items: center; }
.keys span { display: inline-flex; align-items: center; gap: 6px; }
.swatch { width: 14px; height: 14px; border-radius: 4px; display: inline-block; margin-left: 6px; }
.swatch.action { background: color-mix(in srgb, var(--act) 26%, transparent); }
.swatch.observation { background: var(--tint); border: 1px solid var(--rule); }
.swatch.masked { border: 1.5px dashed var(--neg); }
.scale { width: 110px; height: 12px; border-radius: 4px; display: inline-block; }
.scale.signed { background: linear-gradient(90deg, var(--neg), transparent, var(--pos)); }
.scale.plain { background: linear-gradient(90deg, transparent, var(--val)); border: 1px solid var(--rule); }
.key-advantage,.key-ratio,.key-value { display: none !important; }
.switch:has([value=advantage]:checked) .key-advantage,
.switch:has([value=ratio]:checked) .key-ratio,
.switch:has([value=value]:checked) .key-value {
  display: inline-flex !important;
}
.switch:not(:has([value=role]:checked)) .key-role { display: none; }
.example {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 13px 16px;
  margin-bottom: 14px;
}
.example header {
  display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft); align-items: baseline;
}
.reward.good { color: var(--good); }
.reward.bad { color: var(--bad); }
.prompt {
  margin: 7px 0 8px;
  font: 13.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  white-space: pre-wrap;
}
.prompt span { font: 12.5px system-ui, sans-serif; color: var(--faint); margin-right: 6px; }
.example footer { color: var(--faint); font-size: 11.5px; margin-top: 8px; }
.tokens { font: 13.5px/2.05 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
.t { white-space: pre; padding: 3px 5px; margin: 0 1px; border-radius: 4px; cursor: default; }
.t:hover { outline: 2px solid var(--ink); outline-offset: -1px; }
.o { color: var(--soft); }
[data-mode=role] .o { background: var(--tint); }
[data-mode=role] .a { background: color-mix(in srgb, var(--act) 26%, transparent); }
[data-mode=advantage] .a { background: color-mix(in srgb, var(--pos) calc(var(--a)*75%), transparent); }
[data-mode=advantage] .an { background: color-mix(in srgb, var(--neg) calc(var(--a)*75%), transparent); }
[data-mode=ratio] .a { background: color-mix(in srgb, var(--pos) calc(var(--r)*75%), transparent); }
[data-mode=ratio] .rn { background: color-mix(in srgb, var(--neg) calc(var(--r)*75%), transparent); }
[data-mode=value] .a { background: color-mix(in srgb, var(--val) calc(var(--v)*75%), transparent); }
.m { box-shadow: none; outline: 1.5px dashed var(--neg); outline-offset: -1px; }
.version { font-style: normal; font-size: 10.5px; color: var(--faint); margin: 0 4px 0 6px; vertical-align: super; }
@media (max-width:640px) {
  main { padding: 24px 16px 48px; }
  .tokens { font-size: 12.5px; }
}
@media print {
  .switch { position: static; }
  .chart, .example, .box { break-inside: avoid; }
}
"""
