"use strict";
// Fetches the description of the API, with a key where the server asks for one, and shows it. All of it comes from this server.

const ask = document.getElementById("ask");
const trouble = document.getElementById("trouble");

function show(description, key) {
  const page = document.getElementById("page");
  if (document.body.dataset.page === "redoc") {
    Redoc.init(description, { hideDownloadButton: true, nativeScrollbars: true }, page);
    return;
  }
  const ui = SwaggerUIBundle({
    spec: description,
    domNode: page,
    deepLinking: true,
    displayOperationId: true,
    filter: true,
    validatorUrl: null,
    onComplete: () => {
      if (key) ui.preauthorizeApiKey("bearer", key);
    },
  });
}

async function load(key) {
  trouble.hidden = true;
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch("openapi.json", { headers });
    if (answer.status === 401) {
      ask.hidden = false;
      if (key) throw new Error("that key is not valid");
      return;
    }
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const description = await answer.json();
    ask.hidden = true;
    show(description, key);
  } catch (error) {
    trouble.textContent = `The description could not be read: ${error.message}`;
    trouble.hidden = false;
  }
}

ask.addEventListener("submit", (event) => {
  event.preventDefault();
  load(document.getElementById("key").value.trim());
});
load("");
