// What htmx does not do: copying, and the events of a search.
"use strict";

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const text = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  } catch {
    // Without https only a selection can be copied.
    getSelection().selectAllChildren(text);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl-C";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
});

// A server that cannot be reached leaves the old answer: say so.
document.addEventListener("htmx:sendError", (event) => {
  const told = document.createElement("p");
  told.className = "error";
  told.setAttribute("role", "alert");
  told.textContent = "The server does not answer.";
  event.detail.target.replaceChildren(told);
});

// Old figures are faint while new ones are worked out.
for (const [name, busy] of [["htmx:beforeRequest", true], ["htmx:afterRequest", false]]) {
  document.addEventListener(name, (event) => event.detail.target.setAttribute("aria-busy", busy));
}

function watch(table) {
  const endings = table.dataset.endings.split(" ");
  const number = (value, digits) => value.toLocaleString("en", {maximumFractionDigits: digits});
  const trial = ({trial_id, outcome, device_bytes, tokens_per_second, seconds, config}) => {
    const fits = outcome === "fits";
    const cells = [
      trial_id, outcome.replaceAll("_", " "), fits && device_bytes ? number(device_bytes / 2 ** 30, 2) + " GiB" : "–",
      fits && tokens_per_second ? number(tokens_per_second, 0) : "–", number(seconds, 1) + " s",
      Object.entries(config).filter(([, value]) => value !== "none" && value !== false).map(([axis, value]) => axis + "=" + value).join(", "),
    ];
    const row = table.tBodies[0].insertRow(0);
    row.className = fits ? "" : "over";
    cells.forEach((text, place) => {
      const cell = row.insertCell();
      cell.className = ["n spread", "", "n", "n", "n spread", ""][place];
      if (place !== 5) return cell.append(text);
      const link = document.createElement("a");
      link.href = "/point/" + trial_id;
      link.textContent = text;
      cell.append(link);
    });
  };
  const refresh = () => htmx.ajax("GET", table.dataset.state, {target: "#state"});
  let over = false;
  let seen = 0; // a new stream begins with the first event again
  const listen = () => {
    const source = new EventSource(table.dataset.events);
    for (const kind of ["queued", "running", "planned", "trial", "set_aside", ...endings]) {
      source.addEventListener(kind, (event) => {
        const {seq, body} = JSON.parse(event.data);
        if (seq <= seen) return;
        seen = seq;
        if (kind === "trial") trial(body);
        over = endings.includes(kind);
        clearTimeout(table.soon);
        table.soon = setTimeout(refresh, 200);
      });
    }
    source.addEventListener("error", () => {
      if (over) return source.close(); // the stream ends with the search
      // The browser connects again by itself, and asks for what it missed, unless the answer was an error.
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
    });
  };
  listen();
}

document.addEventListener("DOMContentLoaded", () => {
  const table = document.getElementById("live");
  if (table) watch(table);
});
