// Tables: sorted by a click on a heading, and one row below the other where they do not fit.

function label(table) {
  const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  for (const row of table.querySelectorAll("tbody tr"))
    [...row.cells].forEach((cell, column) => (cell.dataset.label = headings[column]));
}

function fit(tables) {
  for (const table of tables) {
    delete table.dataset.rows;
    const box = table.closest(".md-typeset__scrollwrap") ?? table;
    if (box.scrollWidth > box.clientWidth) table.dataset.rows = "below";
  }
}

function sortable(table) {
  for (const cell of table.querySelectorAll("thead th"))
    if (cell.style.textAlign === "right") cell.dataset.sortMethod = "number";
  new Tablesort(table);
}

document$.subscribe(() => {
  const tables = document.querySelectorAll(".md-content table:not([class])");
  tables.forEach(label);
  document.querySelectorAll(".sortable table").forEach(sortable);
  fit(tables);
  window.addEventListener("resize", () => fit(tables));
});
