// The frontier as a chart. Plotly is large: it is loaded once the table has been shown.
"use strict";

const chart = document.getElementById("chart");
const field = document.getElementById("limit");
const range = document.getElementById("limit-range");
let told, limit = Number(range.value), traces = [];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const faint = (column) => column.gib.map((gib, i) => (column.out[i] ? 0.8 : gib > limit ? 0.2 : 1));

function made() {
  const found = [];
  for (const [method, {frontier, others}] of Object.entries(told.methods)) {
    const plain = {type: "scatter", name: method, legendgroup: method,
      hovertemplate: "%{y:,.0f} tokens/s, %{x:.2f} GiB<br>%{text}<extra>%{fullData.name}</extra>"};
    found.push({...plain, column: others, showlegend: false, mode: "markers",
      marker: {color: colour(method), size: 6, symbol: others.out.map((out) => (out ? "x-thin" : "circle")),
        line: {color: colour(method), width: 1.5}, opacity: faint(others).map((o) => o * 0.45)}});
    found.push({...plain, column: frontier, mode: "lines+markers", line: {shape: "hv", color: colour(method), width: 1.5},
      marker: {color: colour(method), size: 9, opacity: faint(frontier)}});
  }
  return found.map((trace) => ({...trace, x: trace.column.gib, y: trace.column.speed, text: trace.column.text,
    customdata: trace.column.id}));
}

function layout() {
  const axis = {gridcolor: colour("line"), zerolinecolor: colour("line"), rangemode: "tozero", fixedrange: true};
  const narrow = chart.clientWidth < 500;
  return {
    height: narrow ? 320 : 460, margin: {l: narrow ? 48 : 64, r: 12, t: 12, b: 48}, dragmode: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: colour("text"), family: "system-ui"},
    xaxis: {...axis, title: {text: told.memory}}, yaxis: {...axis, title: {text: narrow ? "" : told.speed}},
    legend: {orientation: "h", y: 1.02, yanchor: "bottom"}, hovermode: "closest",
    hoverlabel: {align: "left", bgcolor: colour("raised"), font: {color: colour("text")}}, shapes: [line()],
  };
}

const line = () => ({type: "line", xref: "x", yref: "paper", x0: limit, x1: limit, y0: 0, y1: 1,
  line: {color: colour("accent"), width: 3, dash: "dash"}, label: {text: limit.toFixed(1) + " GiB", font: {color: colour("text")}}});

async function draw() {
  traces = made();
  await Plotly.react(chart, traces, layout(), {displayModeBar: false, responsive: true, edits: {shapePosition: true}});
}

// Moves the line; `ask` has the server answer under the new limit.
function move(gib, ask) {
  limit = Math.min(Math.max(gib, 0.01), Number(range.max));
  range.value = limit;
  field.value = limit.toFixed(2) + "GiB";
  if (told && window.Plotly) draw();
  if (ask) field.dispatchEvent(new Event("change", {bubbles: true}));
}

range.addEventListener("input", () => move(Number(range.value), false));
range.addEventListener("change", () => move(Number(range.value), true));
document.addEventListener("htmx:afterSwap", () => {
  const now = document.getElementById("limit-now");
  if (!now || Number(now.dataset.gib) === Number(limit.toFixed(2))) return;
  limit = Number(now.dataset.gib); // the field was typed into
  range.value = limit;
  if (told && window.Plotly) draw();
});

async function begin(asked) {
  const answer = await asked;
  if (!answer.ok) throw new Error(answer.statusText);
  told = await answer.json();
  chart.replaceChildren();
  await draw();
  chart.on("plotly_click", ({points: [point]}) => (location.href = "/point/" + point.customdata));
  chart.on("plotly_relayout", (change) => {
    const x = change["shapes[0].x0"];
    if (x !== undefined) move(x, true);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

addEventListener("load", () => {
  const asked = fetch(chart.dataset.points); // while the script comes
  const script = document.createElement("script");
  script.src = chart.dataset.plotly;
  script.onload = () => begin(asked).catch(failed);
  script.onerror = failed;
  document.head.append(script);
});

function failed() {
  chart.textContent = "The chart could not be loaded; the table has the frontier.";
}
