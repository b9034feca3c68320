// Tables that sort and can be searched; meshes that are coloured along another axis. Without it everything is shown.
"use strict";
(() => {
  const value = (row, column) => {
    const cell = row.cells[column], given = cell.dataset.sort;
    if (given === undefined) return cell.textContent;
    return given.trim() !== "" && !Number.isNaN(Number(given)) ? Number(given) : given;
  };
  const compare = (one, other) =>
    typeof one === "number" && typeof other === "number"
      ? one - other
      : String(one).localeCompare(String(other), "en", { numeric: true });

  // The rows beyond the first `most` in their present order are the ones left out.
  const cut = (grid) => {
    const most = Number(grid.dataset.most || Infinity);
    [...grid.querySelectorAll("tbody tr")].forEach((row, place) => row.classList.toggle("more", place >= most));
  };

  const sortBy = (grid, column) => {
    const heads = [...grid.querySelectorAll("thead th")], body = grid.querySelector("tbody");
    const rows = [...body.rows];
    const numeric = rows.length > 0 && typeof value(rows[0], column) === "number";
    const now = heads[column].getAttribute("aria-sort");
    const descending = now ? now === "ascending" : numeric; // numbers: the largest first
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
    rows.sort((one, other) => (descending ? -1 : 1) * compare(value(one, column), value(other, column)));
    body.append(...rows);
    cut(grid);
  };

  const tools = (grid) => {
    const count = grid.querySelectorAll("tbody tr").length;
    const bar = document.createElement("div");
    bar.className = "tools";
    const all = document.createElement("button");
    if ("search" in grid.dataset) {
      const search = document.createElement("input");
      search.type = "search";
      search.placeholder = `search ${count.toLocaleString("en")} rows`;
      search.setAttribute("aria-label", search.placeholder);
      search.addEventListener("input", () => {
        const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
        grid.classList.toggle("short", words.length === 0 && all.dataset.open !== "yes");
        for (const row of grid.querySelectorAll("tbody tr")) {
          const text = row.textContent.toLowerCase();
          row.classList.toggle("unfound", !words.every((word) => text.includes(word)));
        }
      });
      bar.append(search);
    }
    if ("most" in grid.dataset) {
      const label = (open) => (open ? "show fewer" : `show all ${count.toLocaleString("en")} rows`);
      all.type = "button";
      all.textContent = label(false);
      all.addEventListener("click", () => {
        const open = grid.classList.contains("short");
        grid.classList.toggle("short", !open);
        all.dataset.open = open ? "yes" : "no";
        all.textContent = label(open);
      });
      grid.classList.add("short");
      bar.append(all);
      const rest = document.createElement("p"); // paper has no button to ask for them
      rest.className = "note rest";
      rest.textContent = `… and ${(count - Number(grid.dataset.most)).toLocaleString("en")} more rows`;
      grid.after(rest);
    }
    if (bar.childElementCount) grid.after(bar);
  };

  const recolour = (figure, axis) => {
    const colours = Object.values(JSON.parse(figure.dataset.colours))[axis];
    for (const button of figure.querySelectorAll(".choices button"))
      button.setAttribute("aria-pressed", String(Number(button.dataset.axis) === axis));
    figure.querySelector(".way b").textContent = Object.keys(JSON.parse(figure.dataset.colours))[axis];
    for (const seat of figure.querySelectorAll("g[data-at]")) {
      const place = Number(seat.dataset.at.split(",")[axis]), [fill, ink] = colours[place];
      seat.querySelector("rect").setAttribute("fill", fill);
      const label = seat.querySelector("text");
      if (label) { label.textContent = String(place); label.setAttribute("fill", ink); }
    }
  };

  document.body.classList.add("live");
  for (const grid of document.querySelectorAll(".grid")) {
    tools(grid);
    grid.querySelectorAll("thead th").forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sortBy(grid, column));
      head.append(button);
    });
  }
  for (const figure of document.querySelectorAll("figure.mesh"))
    for (const button of figure.querySelectorAll(".choices button"))
      button.addEventListener("click", () => recolour(figure, Number(button.dataset.axis)));
})();
