// Matrices as pictures on a canvas: one pixel a cell, enlarged by the style sheet.

// Returns a Float32Array of base64 text, little-endian as on every machine that runs a browser.
export function floats(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index);
  return new Float32Array(bytes.buffer);
}

const theme = matchMedia('(prefers-color-scheme: dark)');
const colours = new Map();
let drawn = new WeakMap(); // values that a canvas shows
theme.addEventListener('change', () => {
  colours.clear();
  drawn = new WeakMap();
});

// Returns [r, g, b] of a class of the style sheet in the present theme.
function colour(name) {
  if (!colours.has(name)) colours.set(name, resolved(name));
  return colours.get(name);
}

function resolved(name) {
  const probe = document.createElement('span');
  probe.className = `probe ${name}`;
  document.body.append(probe);
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  canvas.fillStyle = getComputedStyle(probe).color;
  canvas.fillRect(0, 0, 1, 1);
  probe.remove();
  return canvas.getImageData(0, 0, 1, 1).data;
}

// Draws values of 0 to 1 from the lowest to the highest colour.
export function drawShares(canvas, values, rows, columns) {
  if (drawn.get(canvas) === values) return;
  const [low, high] = [colour('heat-low'), colour('heat-high')];
  // Small weights are many and matter: the square root makes 1 % visible.
  draw(canvas, values, rows, columns, (value) => [low, high, Math.sqrt(Math.max(0, Math.min(1, value)))]);
}

// Draws values around 0, the largest magnitude in full colour.
export function drawSigned(canvas, values, rows, columns) {
  if (drawn.get(canvas) === values) return;
  const [below, middle, above] = ['heat-below', 'heat-low', 'heat-above'].map(colour);
  let largest = 1e-9;
  for (const value of values) largest = Math.max(largest, Math.abs(value));
  draw(canvas, values, rows, columns, (value) => [middle, value < 0 ? below : above, Math.abs(value) / largest]);
}

function draw(canvas, values, rows, columns, mix) {
  drawn.set(canvas, values);
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext('2d');
  const picture = context.createImageData(columns, rows);
  for (let cell = 0; cell < rows * columns; cell += 1) {
    const [from, to, share] = mix(values[cell]);
    for (let channel = 0; channel < 3; channel += 1) {
      picture.data[cell * 4 + channel] = from[channel] + (to[channel] - from[channel]) * share;
    }
    picture.data[cell * 4 + 3] = 255;
  }
  context.putImageData(picture, 0, 0);
}
