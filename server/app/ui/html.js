// Preact and htm, bound once: templates without a build step.
import { Component, createRef, h, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.module.js";

export const html = htm.bind(h);
export { Component, createRef, render };
